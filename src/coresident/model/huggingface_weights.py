"""Which part of our weights is which of transformers' tensors: one table, read in both directions.

Ours are joined for speed (query, key and value; gate and up; all experts of a layer); on disk transformers has each
apart, [out, in], the gate before the up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from coresident.model.shape import ModelShape


@dataclass(frozen=True)
class Part:
    """`theirs` is, of our parameter `ours`, the expert `expert` (None: all of it) and of that the rows [first, last)."""

    theirs: str
    ours: str
    expert: int | None = None
    first: int = 0
    last: int | None = None

    def of(self, weight: Tensor) -> Tensor:
        """The part, as a view of our `weight`."""
        whole = weight if self.expert is None else weight[self.expert]
        return whole[self.first : self.last]


def parts(shape: ModelShape) -> Iterator[Part]:
    """Every tensor of the model on disk; together they are every weight of ours once."""
    yield Part("model.embed_tokens.weight", "embedding")
    yield Part("model.norm.weight", "norm.weight")
    if not shape.tied:
        yield Part("lm_head.weight", "output")
    for layer in range(shape.layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        yield Part(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight")
        yield Part(f"{theirs}.post_attention_layernorm.weight", f"{ours}.feedforward_norm.weight")
        yield from _attention(shape, f"{ours}.attention", f"{theirs}.self_attn")
        yield from _feedforward(shape, f"{ours}.feedforward", f"{theirs}.mlp")


def _attention(shape: ModelShape, ours: str, theirs: str) -> Iterator[Part]:
    for place, name in enumerate(("q_proj", "k_proj", "v_proj")):
        first = place * shape.width
        yield Part(f"{theirs}.{name}.weight", f"{ours}.qkv", None, first, first + shape.width)
    yield Part(f"{theirs}.o_proj.weight", f"{ours}.out")
    if shape.qk_norm:
        yield Part(f"{theirs}.q_norm.weight", f"{ours}.query_norm.weight")
        yield Part(f"{theirs}.k_norm.weight", f"{ours}.key_norm.weight")


def _feedforward(shape: ModelShape, ours: str, theirs: str) -> Iterator[Part]:
    if shape.mixture is None:
        yield from _swiglu(shape.feedforward or 0, ours, theirs, None)
        return
    yield Part(f"{theirs}.gate.weight", f"{ours}.router")
    for expert in range(shape.mixture.experts):
        yield from _swiglu(shape.mixture.width, ours, f"{theirs}.experts.{expert}", expert)


def _swiglu(inner: int, ours: str, theirs: str, expert: int | None) -> Iterator[Part]:
    yield Part(f"{theirs}.gate_proj.weight", f"{ours}.gate_up", expert, 0, inner)
    yield Part(f"{theirs}.up_proj.weight", f"{ours}.gate_up", expert, inner, 2 * inner)
    yield Part(f"{theirs}.down_proj.weight", f"{ours}.down", expert)
