"""How each kernel is launched: grids and block sizes, from tensors."""

from __future__ import annotations

import triton
from torch import Tensor

from coresident.engines.moe.decoder import kernels
from coresident.engines.moe.models.architecture import Architecture
from coresident.engines.moe.models.dense import Dense, Layer
from coresident.engines.moe.residency.slots import Slots

# Rows of a weight that one program reads, and how much of them at a time: 16 KiB in flight a program in bfloat16.
_ROWS, _COLUMNS = 8, 512


def add_norm(
    found: Architecture,
    residual: Tensor,
    added: Tensor,
    scales: Tensor | None,
    weight: Tensor,
    normed: Tensor,
    count: int,
) -> None:
    """residual [B, H] += the `count` rows of added [B, count, H], weighted by `scales`; its norm goes to `normed`."""
    width = found.width
    kernels.add_norm[(len(residual),)](
        residual, added, added if scales is None else scales, weight, normed, found.eps, width,
        K=count, SCALED=scales is not None, BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip


def finish_qkv(
    found: Architecture,
    dense: Dense,
    layer: Layer,
    qkv: Tensor,
    lengths: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Normalised, turned queries of qkv [B, .] to `query`; keys and values into the cache [B, kv_heads, T, D] at `lengths`."""
    wide = found.heads * found.head_width
    kernels.finish_qkv[(len(qkv), found.heads + 2 * found.kv_heads)](
        qkv, layer.query_norm, layer.key_norm, dense.cosines, dense.sines, lengths, query, keys, values,
        found.eps, 0.0 if found.clip is None else found.clip, keys.stride(0), keys.stride(1),
        HEADS=found.heads, KV=found.kv_heads, D=found.head_width, FULL=found.qk_norm == "full",
        CLIP=found.clip is not None, BLOCK=triton.next_power_of_2(found.head_width // 2),
        WIDE=triton.next_power_of_2(wide),
    )  # fmt: skip


def attend(
    found: Architecture, query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, out: Tensor
) -> None:
    """out [B, heads * D]: each query over its row's cache up to its own position, `lengths`."""
    kernels.attend[(len(query), found.heads)](
        query, keys, values, lengths, out, found.head_width**-0.5, keys.stride(0), keys.stride(1),
        HEADS=found.heads, GROUP=found.heads // found.kv_heads, D=found.head_width,
        BLOCK_T=64, BLOCK=triton.next_power_of_2(found.head_width),
    )  # fmt: skip


def route(found: Architecture, logits: Tensor, chosen: Tensor, weights: Tensor) -> None:
    """The experts of each row of logits [B, E], and their weights, one after another [B K]."""
    kernels.route[(len(logits),)](
        logits, chosen, weights, found.experts,
        K=found.top_k, NORMALISE=found.normalise, BLOCK=triton.next_power_of_2(found.experts),
    )  # fmt: skip


def experts(
    found: Architecture, slots: Slots, layer: int, x: Tensor, chosen: Tensor, inner: Tensor, out: Tensor
) -> None:
    """out [B K, H]: what each row's experts make of x [B, H], wherever they lie; unweighted."""
    stored, width, inside = slots.stored, found.width, found.expert_width
    four = stored.upper_scales is not None
    upper = stored.gate_up if stored.upper_scales is None else stored.upper_scales
    lower = stored.down if stored.lower_scales is None else stored.lower_scales
    pairs, map_row = len(chosen), slots.map[layer]
    columns = min(_COLUMNS, triton.next_power_of_2(max(width, inside)))
    kernels.gate_up[(pairs, triton.cdiv(inside, _ROWS))](
        x, chosen, map_row, stored.gate_up, upper, inner, width, inside, stored.gate_up.stride(0), upper.stride(0),
        K=found.top_k, Q4=four, ROWS=_ROWS, BLOCK=columns,
    )  # fmt: skip
    kernels.down[(pairs, triton.cdiv(width, _ROWS))](
        inner, chosen, map_row, stored.down, lower, out, width, inside, stored.down.stride(0), lower.stride(0),
        Q4=four, ROWS=_ROWS, BLOCK=columns,
    )  # fmt: skip
