"""Bases of Llama's kind (Llama, Mistral, Qwen2): what of them a decoder that is written out needs, and whether they are such."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from coresident.engines.pool.packed.policy import Policy

if TYPE_CHECKING:
    from torch import Tensor

# Kinds of rotary angles that depend on positions alone.
_STEADY = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Projection:
    """A frozen linear layer, and the number of its adapter (-1: it has none)."""

    base: nn.Module
    number: int


@dataclass(frozen=True)
class Layer:
    """One decoder layer's parts; projections that read the same input stand together."""

    qkv: tuple[Projection, Projection, Projection]
    out: tuple[Projection]
    gate_up: tuple[Projection, Projection]
    down: tuple[Projection]
    before: tuple[Tensor, float]
    between: tuple[Tensor, float]
    heads: tuple[int, int, int]
    scale: float


def layers_of(policy: Policy) -> tuple[Layer, ...] | str:
    """The policy's layers, or why its base is not of this kind."""
    model: Any = policy.scorer.decoder
    numbers = {layer.path: number for number, layer in enumerate(policy.layers)}
    paths = {id(module): path for path, module in policy.base.named_modules()}
    config = policy.base.config.get_text_config()
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}"
    kind = getattr(getattr(model, "rotary_emb", None), "rope_type", None)
    if kind not in _STEADY:
        return f"its rotary angles are of the kind {kind}"

    def projection(module: Any) -> Projection:
        return Projection(getattr(module, "base_layer", module), numbers.get(paths[id(module)], -1))

    found = []
    for layer in model.layers:
        parts = {name for name, _ in layer.named_children()}
        known = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        expected = {"q_proj", "k_proj", "v_proj", "o_proj"}
        if parts != known:
            return f"a layer of {type(model).__name__} has other parts"
        attention, mlp = layer.self_attn, layer.mlp
        if {name for name, _ in attention.named_children()} != expected:
            return f"an attention of {type(model).__name__} has other parts"
        if not {"gate_proj", "up_proj", "down_proj"} <= {name for name, _ in mlp.named_children()}:
            return f"a feed-forward layer of {type(model).__name__} has other parts"
        width = int(attention.head_dim)
        q, k, v = (projection(getattr(attention, f"{name}_proj")) for name in "qkv")
        inputs = [layer.input_layernorm, layer.post_attention_layernorm]
        before, after = ((norm.weight, float(norm.variance_epsilon)) for norm in inputs)
        bases: list[Any] = [q.base, k.base]
        found.append(
            Layer(
                (q, k, v),
                (projection(attention.o_proj),),
                (projection(mlp.gate_proj), projection(mlp.up_proj)),
                (projection(mlp.down_proj),),
                before,
                after,
                (bases[0].out_features // width, bases[1].out_features // width, width),
                float(attention.scaling),
            )
        )
    return tuple(found)
