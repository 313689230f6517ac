"""Every token through the experts it was sent to: by groups, for a card, and one expert after another, which is plain.

`grouped` sorts the token-expert pairs by expert, so that each expert's rows lie together, and multiplies all groups in
one kernel. It never waits for the host: sizes are always rows x top_k, whatever the routing. Rows travel to the
experts and back by two gathers that are each other's transpose, so that neither direction adds with atomics and
equal input gives equal bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coresident.model.feedforward import swiglu


def plain(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """sum_k weights[n, k] * expert(experts[n, k])(x[n]): the oracle, in any dtype.

    x [N, d], experts [N, K] of int64, weights [N, K], gate_up [E, 2 w, d] with the gate first, down [E, d, w].
    Returns [N, d].
    """
    mixed = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        token, place = torch.where(experts == expert)
        inner = swiglu(F.linear(x[token], gate_up[expert]))
        scaled = F.linear(inner, down[expert]) * weights[token, place, None]
        mixed = mixed.index_add(0, token, scaled.to(mixed.dtype))
    return mixed


def grouped(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """`plain` in three gathers and two grouped products; all in x's dtype.

    The weight scales a row between the two products, where it is narrowest; the second is linear.
    """
    ordered, places, ends = by_expert(experts, len(gate_up))
    top_k = experts.shape[1]
    rows = _dispatched(x, ordered, places, top_k)
    inner = swiglu(F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends))
    scaled = inner * _dispatched(weights.reshape(-1, 1), ordered, places, 1)
    out = F.grouped_mm(scaled.to(x.dtype), down.transpose(1, 2), offs=ends)
    return _combined(out, ordered, places, top_k)


def by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs of `experts` [N, K], flattened and sorted by expert; pairs of one expert keep their order.

    Returns which pair each row holds [N K], in which row each pair is [N K], both int64, and where each expert's
    rows end [E], int32.
    """
    pairs = experts.reshape(-1)
    # A narrow key is sorted in fewer passes.
    key = torch.uint8 if count <= 256 else torch.int16
    keys, ordered = torch.sort(pairs.to(key), stable=True)
    places = torch.empty_like(ordered).scatter(0, ordered, torch.arange(len(pairs), device=pairs.device))
    each = torch.arange(count, dtype=key, device=pairs.device)
    return ordered, places, torch.searchsorted(keys, each, right=True, out_int32=True)


def _dispatched(x: Tensor, ordered: Tensor, places: Tensor, top_k: int) -> Tensor:
    rows: Tensor = _Dispatch.apply(x, ordered, places, top_k)  # type: ignore[no-untyped-call]
    return rows


def _combined(rows: Tensor, ordered: Tensor, places: Tensor, top_k: int) -> Tensor:
    mixed: Tensor = _Combine.apply(rows, ordered, places, top_k)  # type: ignore[no-untyped-call]
    return mixed


def _send(x: Tensor, ordered: Tensor, top_k: int) -> Tensor:
    return x.index_select(0, ordered // top_k)


def _gather(rows: Tensor, places: Tensor, top_k: int) -> Tensor:
    return rows.index_select(0, places).view(-1, top_k, rows.shape[1]).sum(1)


class _Dispatch(torch.autograd.Function):
    """x [N, d] to rows [N K, d], each token's once for every expert of its."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ordered: Tensor, places: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(ordered, places)
        ctx.top_k = top_k
        return _send(x, ordered, top_k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _, places = ctx.saved_tensors
        return _gather(gradient, places, ctx.top_k), None, None, None


class _Combine(torch.autograd.Function):
    """Rows [N K, d] to their tokens' sums [N, d]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ordered: Tensor, places: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(ordered, places)
        ctx.top_k = top_k
        return _gather(rows, places, top_k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ordered, _ = ctx.saved_tensors
        return _send(gradient, ordered, ctx.top_k), None, None, None
