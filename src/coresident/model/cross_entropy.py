"""Cross-entropy of the output layer, summed over the targets that count.

The logits are the largest tensor of a small model: 131,072 tokens x 32,000 in bfloat16 are 8.4 GB. `plain` makes them
whole, and is the oracle. `chunked` makes some rows at a time, and with them at once their gradient: hidden states
get softmax(logits) - one_hot(target) times the table, and the table the transpose times the hidden states, neither of
which depends on anything that comes later, so that nothing is kept or computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def plain(hidden: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    """sum_n -log softmax(hidden[n] table^T)[targets[n]], without those that are -100; float32 at least.

    hidden [N, d], table [V, d], targets [N] of int64. Under autocast the product is autocast's, as in any linear layer.
    """
    logits = F.linear(hidden, table)
    exact = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(exact), targets, ignore_index=IGNORED, reduction="sum")


def chunked(hidden: Tensor, table: Tensor, targets: Tensor, rows: int) -> Tensor:
    """`plain`, of `rows` rows at a time; differentiable once."""
    if not torch.is_grad_enabled():
        parts = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
        return torch.stack([plain(part, table, wanted) for part, wanted in parts]).sum()
    device = hidden.device.type
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):
        total: Tensor = _Chunked.apply(hidden.to(kind), table.to(kind), targets, rows)  # type: ignore[no-untyped-call]
    return total


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, table: Tensor, targets: Tensor, rows: int) -> Tensor:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        by_table = torch.zeros(table.shape, dtype=exact, device=hidden.device)
        by_hidden = []
        words = torch.arange(len(table), device=hidden.device)
        for part, wanted in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
            logits = part @ table.T
            wide = logits.to(exact)
            scale = wide.logsumexp(-1, keepdim=True)
            counted = (wanted != IGNORED)[:, None]
            here = words == wanted[:, None]
            picked = logits.gather(1, wanted.clamp(min=0)[:, None])
            total = total + ((scale - picked) * counted).sum()
            slope = (((wide - scale).exp() - here.to(exact)) * counted).to(hidden.dtype)
            by_hidden.append(slope @ table)
            by_table = by_table + slope.T @ part
        ctx.save_for_backward(torch.cat(by_hidden), by_table)
        ctx.kind = table.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        by_hidden, by_table = ctx.saved_tensors
        return (by_hidden * gradient).to(by_hidden.dtype), (by_table * gradient).to(ctx.kind), None, None
