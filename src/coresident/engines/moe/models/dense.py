"""All that is always resident: embedding, attention, routers, norms, dense layers, output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from coresident.engines.moe.models.architecture import Architecture
from coresident.engines.moe.models.checkpoint import dense_shapes
from coresident.engines.moe.models.origins import Origin
from coresident.model.rope import tables

_WIDTH = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


@dataclass(frozen=True)
class Layer:
    """`qkv` [(heads + 2 kv_heads) D, H] in this order; `router` [E, H] in float32, or a dense SwiGLU's `gate_up`, `down`."""

    attention_norm: Tensor
    qkv: Tensor
    query_norm: Tensor
    key_norm: Tensor
    out: Tensor
    feedforward_norm: Tensor
    router: Tensor | None
    gate_up: Tensor | None
    down: Tensor | None


@dataclass(frozen=True)
class Dense:
    """Weights on the device; `cosines` and `sines` [context, D / 2] in float32."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    output: Tensor
    cosines: Tensor
    sines: Tensor


class _Taken(Protocol):
    def __call__(self, name: str, kind: torch.dtype = ...) -> Tensor: ...


def load(origin: Origin, device: torch.device, dtype: torch.dtype, context: int) -> Dense:
    """The dense weights in `dtype` on `device`, with positions up to `context`."""
    found = origin.architecture

    def taken(name: str, kind: torch.dtype = dtype) -> Tensor:
        return origin.dense(name).to(device, kind)

    embedding = taken("model.embed_tokens.weight")
    cosines, sines = tables(context, found.head_width, found.theta)
    return Dense(
        embedding,
        tuple(_layer(taken, layer, sparse) for layer, sparse in enumerate(found.sparse)),
        taken("model.norm.weight"),
        embedding if found.tied else taken("lm_head.weight"),
        cosines.to(device),
        sines.to(device),
    )


def nbytes(found: Architecture, dtype: torch.dtype) -> int:
    """Bytes that `load` occupies, positions aside."""
    total = 0
    for name, shape in dense_shapes(found).items():
        count = 1
        for size in shape:
            count *= size
        total += count * (4 if name.endswith("mlp.gate.weight") else _WIDTH[dtype])
    return total


def _layer(taken: _Taken, layer: int, sparse: bool) -> Layer:
    start = f"model.layers.{layer}"
    attention, mlp = f"{start}.self_attn", f"{start}.mlp"
    return Layer(
        taken(f"{start}.input_layernorm.weight"),
        torch.cat([taken(f"{attention}.{name}_proj.weight") for name in "qkv"]),
        taken(f"{attention}.q_norm.weight"),
        taken(f"{attention}.k_norm.weight"),
        taken(f"{attention}.o_proj.weight"),
        taken(f"{start}.post_attention_layernorm.weight"),
        # In float32: bfloat16 logits tie, and which experts a tie takes is noise.
        taken(f"{mlp}.gate.weight", torch.float32) if sparse else None,
        None if sparse else torch.cat((taken(f"{mlp}.gate_proj.weight"), taken(f"{mlp}.up_proj.weight"))),
        None if sparse else taken(f"{mlp}.down_proj.weight"),
    )
