"""Causal attention over packed rows: laid out by sequence, PyTorch's own kernel, and taken back.

Gathers in both directions, forward and backward, so that no two gradients meet in one place: equal from run to run, and
an empty cell's gradient, which nobody asked for, goes nowhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from coresident.engines.pool.packed.rows import Rows
from coresident.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

# What a model's attention may ask for beyond plain causal attention, which would change its results here.
_SPECIAL = ("softcap", "s_aux", "position_bias")


def laid_out(rows: Rows, states: Tensor) -> Tensor:
    """[T, heads, d] as [S, heads, L, d]."""
    if not rows.whole:
        states = _Regrouped.apply(states, rows.into, rows.back, rows.kept)  # type: ignore[no-untyped-call]
    return states.view(rows.sequences, rows.longest, *states.shape[1:]).transpose(1, 2)


def taken_back(rows: Rows, states: Tensor) -> Tensor:
    """[S, heads, L, d] as [T, heads, d]."""
    flat = states.transpose(1, 2).flatten(0, 1)
    if rows.whole:
        return flat
    return _Regrouped.apply(flat, rows.back, rows.into, rows.real)  # type: ignore[no-any-return, no-untyped-call]


def attend(rows: Rows, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """[T, heads, d] by [T, key heads, d] twice: [T, heads, d]; each token sees its own sequence up to itself."""
    found = F.scaled_dot_product_attention(
        laid_out(rows, query),
        laid_out(rows, key),
        laid_out(rows, value),
        is_causal=True,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return taken_back(rows, found)


class Attention:
    """A pack's attention as transformers calls it, for the rows of the step that is on."""

    rows: Rows

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        scaling: float | None = None,
        **named: Any,
    ) -> tuple[Tensor, None]:
        """[1, heads, T, d] each; returns [1, T, heads, d]."""
        asked = [name for name in _SPECIAL if named.get(name) is not None]
        window = named.get("sliding_window")
        if asked or (window is not None and window < self.rows.longest):
            what = asked[0] if asked else f"a window of {window} tokens"
            raise UserError(
                f"sharing: packed has plain causal attention, and {type(module).__name__} asks for {what}",
                "use another sharing for this base",
            )
        query, key, value = (state[0].transpose(0, 1) for state in (query, key, value))
        return attend(self.rows, query, key, value, scaling)[None], None


class _Regrouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, there: Tensor, back: Tensor, counted: Tensor | None) -> Tensor:
        ctx.save_for_backward(back, counted)
        return values.index_select(0, there)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        back, counted = ctx.saved_tensors
        found = gradient.index_select(0, back)
        if counted is not None:
            found.masked_fill_(~counted.view(-1, *[1] * (found.dim() - 1)), 0)
        return found, None, None, None
