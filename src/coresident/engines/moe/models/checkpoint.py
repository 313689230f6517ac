"""A model on disk whose every tensor is accounted for by name: what a part of the model needs, and nothing else.

Experts come apart (one tensor each for gate, up and down) or stacked as transformers 5 keeps them in memory (`gate_up_proj`
[E, 2 I, H], the gate first, and `down_proj` [E, H, I]). Either way each is three byte ranges of files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from coresident.engines.moe.models import architecture
from coresident.engines.moe.models.architecture import Architecture
from coresident.engines.moe.models.stored import WIDTHS, Piece, stored
from coresident.errors import UserError

Expert = tuple[Piece, Piece, Piece]
_AGAIN = "copy the model's files again from their source"
# Of each expert's tensor so many bytes enter the model's identity; routers and norms enter whole.
_SAMPLE = 256
# Bytes that are compared at a time.
_BLOCK = 1 << 24


@dataclass(frozen=True)
class Checkpoint:
    """`dense`: all tensors that are no experts, by name. `experts[layer][expert]`: gate [I, H], up [I, H], down [H, I];
    a layer here is the n-th of those that have experts.
    """

    path: Path
    architecture: Architecture
    dense: Mapping[str, Piece]
    experts: tuple[tuple[Expert, ...], ...]

    @cached_property
    def expert_dtype(self) -> str:
        """The dtype that all experts' weights fit in unrounded."""
        found = {piece.dtype for layer in self.experts for expert in layer for piece in expert}
        return found.pop() if len(found) == 1 else "F32"

    @property
    def uniform(self) -> bool:
        """Whether every expert tensor is stored in `expert_dtype`."""
        return all(
            piece.dtype == self.expert_dtype for layer in self.experts for expert in layer for piece in expert
        )

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the architecture, the routers and norms, and a sample of every expert's tensors: equal for the same
        model however it is sharded or stacked, and different for a model that was trained on.
        """
        hashed = hashlib.sha256(repr(_computed(self.architecture)).encode())
        small = sorted(name for name in self.dense if name.endswith(("mlp.gate.weight", "norm.weight")))
        for name in small:
            piece = self.dense[name]
            hashed.update(name.encode() + piece.dtype.encode() + read(piece, piece.size))
        for layer in self.experts:
            for expert in layer:
                for piece in expert:
                    hashed.update(piece.dtype.encode() + read(piece, min(piece.size, _SAMPLE)))
        return hashed.hexdigest()


def open_checkpoint(path: Path) -> Checkpoint:
    """The model in the Hugging Face directory `path`.

    Raises UserError, naming the tensor, for one that is missing, has no place, or has another shape or no float dtype.
    """
    found = architecture.read(path)
    tensors = stored(path)
    dense = {name: _taken(tensors, name, shape, path) for name, shape in dense_shapes(found).items()}
    experts = tuple(_experts(tensors, found, layer, path) for layer in found.mixtures)
    for name in list(tensors):
        # Tables that follow from the config.
        if name.endswith("rotary_emb.inv_freq"):
            del tensors[name]
    if found.tied and "lm_head.weight" in tensors:
        _again(tensors.pop("lm_head.weight"), dense["model.embed_tokens.weight"])
    if tensors:
        name = min(tensors)
        raise UserError(
            f"{tensors[name].file}: its tensor {name} has no place in the model that {architecture.CONFIG} describes"
            f" ({len(tensors)} such)",
            "give the config.json that belongs to these weights",
        )
    return Checkpoint(path, found, dense, experts)


def dense_shapes(found: Architecture) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that are no experts."""
    width, query = found.width, found.heads * found.head_width
    key = found.kv_heads * found.head_width
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (found.vocabulary, width)}
    for layer, sparse in enumerate(found.sparse):
        start = f"model.layers.{layer}"
        shapes |= {
            f"{start}.input_layernorm.weight": (width,),
            f"{start}.post_attention_layernorm.weight": (width,),
            f"{start}.self_attn.q_proj.weight": (query, width),
            f"{start}.self_attn.k_proj.weight": (key, width),
            f"{start}.self_attn.v_proj.weight": (key, width),
            f"{start}.self_attn.o_proj.weight": (width, query),
            f"{start}.self_attn.q_norm.weight": (query if found.qk_norm == "full" else found.head_width,),
            f"{start}.self_attn.k_norm.weight": (key if found.qk_norm == "full" else found.head_width,),
        }
        if sparse:
            shapes[f"{start}.mlp.gate.weight"] = (found.experts, width)
        else:
            shapes |= {
                f"{start}.mlp.gate_proj.weight": (found.dense_width, width),
                f"{start}.mlp.up_proj.weight": (found.dense_width, width),
                f"{start}.mlp.down_proj.weight": (width, found.dense_width),
            }
    shapes["model.norm.weight"] = (width,)
    if not found.tied:
        shapes["lm_head.weight"] = (found.vocabulary, width)
    return shapes


def read(piece: Piece, size: int) -> bytes:
    """The piece's first `size` bytes."""
    try:
        with piece.file.open("rb") as opened:
            opened.seek(piece.offset)
            return opened.read(size)
    except OSError as error:
        raise UserError(f"{piece.file} cannot be read: {error.strerror}", _AGAIN) from None


def _again(output: Piece, embedding: Piece) -> None:
    """Refuse an output layer that is not the embedding where the config says that it is."""
    same = (output.dtype, output.shape) == (embedding.dtype, embedding.shape)
    for at in range(0, output.size if same else 0, _BLOCK):
        parts = (replace(one, offset=one.offset + at) for one in (output, embedding))
        first, second = (read(part, min(_BLOCK, output.size - at)) for part in parts)
        same = same and first == second
    if not same:
        raise UserError(
            f"{output.file}: {output.name} differs from the embedding, and {architecture.CONFIG} ties the two",
            "set tie_word_embeddings to false there, or give the weights that belong to it",
        )


def _experts(tensors: dict[str, Piece], found: Architecture, layer: int, path: Path) -> tuple[Expert, ...]:
    width, inner = found.width, found.expert_width
    start = f"model.layers.{layer}.mlp.experts"
    if f"{start}.gate_up_proj" in tensors or f"{start}.down_proj" in tensors:
        return tuple(_stacked(tensors, found, start, path))
    return tuple(
        (
            _taken(tensors, f"{start}.{expert}.gate_proj.weight", (inner, width), path),
            _taken(tensors, f"{start}.{expert}.up_proj.weight", (inner, width), path),
            _taken(tensors, f"{start}.{expert}.down_proj.weight", (width, inner), path),
        )
        for expert in range(found.experts)
    )


def _stacked(tensors: dict[str, Piece], found: Architecture, start: str, path: Path) -> Iterator[Expert]:
    width, inner = found.width, found.expert_width
    down = tensors.get(f"{start}.down_proj")
    # Where 2 I = H a transposed gate_up passes every check of shapes. Who transposes one transposes both, and the down
    # projection shows it, since 2 I = H leaves I != H.
    if down is not None and down.shape == (found.experts, inner, width) and inner != width:
        raise UserError(
            f"{down.file}: {down.name} is {list(down.shape)}, the transpose of {[found.experts, width, inner]}",
            "store gate_up_proj as [experts, 2 x inner, hidden] and down_proj as [experts, hidden, inner]",
        )
    down = _taken(tensors, f"{start}.down_proj", (found.experts, width, inner), path)
    both = _taken(tensors, f"{start}.gate_up_proj", (found.experts, 2 * inner, width), path)
    for expert in range(found.experts):
        joined = both.at(expert)
        yield joined.rows(0, inner), joined.rows(inner, 2 * inner), down.at(expert)


def _taken(tensors: dict[str, Piece], name: str, shape: tuple[int, ...], path: Path) -> Piece:
    piece = tensors.pop(name, None)
    if piece is None:
        raise UserError(f"{path}: the tensor {name} is missing", _AGAIN)
    if piece.shape != shape or piece.dtype not in WIDTHS:
        raise UserError(
            f"{piece.file}: {name} is {piece.dtype} {list(piece.shape)}, and {architecture.CONFIG} says floats {list(shape)}",
            "give the config.json that belongs to these weights",
        )
    return piece


def _computed(found: Architecture) -> tuple[object, ...]:
    """All that decides numbers: not where a text ends."""
    return tuple(value for name, value in vars(found).items() if name != "ends")
