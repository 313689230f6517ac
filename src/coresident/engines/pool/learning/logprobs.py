"""Log-probabilities of tokens without the logits of all of them: the vocabulary's table is the largest thing a
learner would ever make, and it is never there whole.

Only positions whose next token counts are scored, and those in chunks: at most one chunk of rows x vocabulary
exists at a time, `BUDGET` bytes of it. The output layer is frozen, so that the gradient of a row's
log-probability by its hidden state, W[label] - sum_v p(v) W[v], depends on nothing that comes later: it is made
together with the log-probability, while the chunk is there, and the backward pass only scales it. Nothing is
computed twice.

Liger-Kernel does not serve here: its linear cross-entropy waits for the device in every call to count labels and
recomputes everything where each row has a gradient of its own, its preference losses always make the gradient
of the head, as large as the table, and it needs Triton, while this is one code on CPU and GPU.

Products are in the model's dtype, as the model's own output layer does them; everything after is float32
(float64 for a float64 model). `plain` is the same in one line each and is what the rest is held to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from coresident.engines.pool.learning.chunks import BUDGET, chunk_rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BUDGET", "chunk_rows", "fused", "log_softmax", "plain"]


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """Log-probabilities of `labels` [R] after `hidden` [R, H] under the output layer `weight` [V, H]: [R]."""
    return log_softmax(F.linear(hidden, weight, bias)).gather(1, labels[:, None])[:, 0]


def fused(
    hidden: Tensor,
    places: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    budget: int = BUDGET,
) -> Tensor:
    """`plain(hidden[places], ...)`, chunk by chunk; `places` [R] are distinct rows of `hidden` [N, H].

    float32 (float64 for float64), shape [R]. Differentiable by `hidden` only. Equal from run to run, bit for
    bit.
    """
    scored: Tensor = _Fused.apply(hidden, places, weight, bias, labels, budget)  # type: ignore[no-untyped-call]
    return scored


def log_softmax(logits: Tensor) -> Tensor:
    """Over the last dimension, in float32 at least."""
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        places: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        budget: int,
    ) -> Tensor:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        rows = hidden.index_select(0, places)
        scored = torch.empty(len(labels), dtype=exact, device=hidden.device)
        wanted = ctx.needs_input_grad[0]
        slopes = torch.empty_like(rows) if wanted else None
        size = chunk_rows(len(labels), weight.shape[0], exact.itemsize, budget)
        for start in range(0, len(labels), size):
            part = slice(start, start + size)
            table = log_softmax(F.linear(rows[part], weight, bias))
            label = labels[part, None]
            score = table.gather(1, label)
            scored[part] = score[:, 0]
            if slopes is not None:
                # One at the label less the probabilities, before rounding: near certainty their difference is
                # all there is.
                torch.exp_(table).neg_()
                table.scatter_(1, label, torch.expm1(score).neg_())
                torch.mm(table.to(rows.dtype), weight, out=slopes[part])
            # Freed before the next chunk's logits are made, which would otherwise be there together with these.
            del table
        ctx.save_for_backward(slopes, places)
        ctx.shape = hidden.shape
        return scored

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        slopes, places = ctx.saved_tensors
        rows = (slopes * gradient[:, None]).to(slopes.dtype)
        # Places are distinct: copied, not added, which has one result in any order.
        full = rows.new_zeros(ctx.shape).index_copy_(0, places, rows)
        return full, None, None, None, None, None
