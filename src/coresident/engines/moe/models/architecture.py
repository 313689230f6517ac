"""What a Mixture-of-Experts model is: OLMoE's or Qwen3-MoE's `config.json`, read strictly.

A setting that we do not compute (biases, stretched positions, a sliding window) would load well and say nonsense, so it is
refused. Our own exported mixtures are OLMoE directories. Needs no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from coresident.errors import UserError, nearest

CONFIG, GENERATION = "config.json", "generation_config.json"
_AGAIN = "copy config.json again from the model's source"
# transformers' own defaults, for keys that a config may leave out.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "olmoe": {"norm_topk_prob": False, "rms_norm_eps": 1e-5},
    "qwen3_moe": {"norm_topk_prob": False, "rms_norm_eps": 1e-6},
}
# More is a slip, and each is listed.
_MOST_LAYERS = 10_000
_ONLY: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "rope_scaling": None,
}


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of one model.

    `sparse[layer]` says whether a layer has experts; the others are SwiGLUs of `dense_width`. `qk_norm` is over the full
    width before heads are split (OLMoE) or over each head (Qwen3). `normalise` makes a token's chosen weights sum to one.
    `clip` bounds queries, keys and values (OLMoE's clip_qkv). `ends` are the tokens after which a text is over.
    """

    kind: Literal["olmoe", "qwen3_moe"]
    vocabulary: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    experts: int
    top_k: int
    expert_width: int
    dense_width: int
    sparse: tuple[bool, ...]
    normalise: bool
    qk_norm: Literal["full", "head"]
    eps: float
    theta: float
    context: int
    tied: bool
    clip: float | None
    ends: tuple[int, ...] = ()

    @property
    def layers(self) -> int:
        """All layers, dense ones too."""
        return len(self.sparse)

    @property
    def mixtures(self) -> tuple[int, ...]:
        """The layers that have experts, ascending: the n-th is what caches and traces call layer n."""
        return tuple(layer for layer, sparse in enumerate(self.sparse) if sparse)

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert."""
        return 3 * self.width * self.expert_width


def read(path: Path) -> Architecture:
    """The architecture of the Hugging Face directory `path`. Raises UserError where there is none that we compute."""
    file, remedy = path / CONFIG, "give a Hugging Face directory of an OLMoE or Qwen3-MoE model"
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file, and a model is a directory", remedy)
    config = _object(file, remedy)
    found = parse(config, str(file))
    extra = path / GENERATION
    if extra.is_file():
        try:
            ends = _ends(_object(extra, _AGAIN).get("eos_token_id"))
        except (TypeError, ValueError, ArithmeticError) as error:
            raise UserError(
                f"{extra}: eos_token_id: {error}", "copy it again from the model's source"
            ) from None
        found = _with_ends(found, ends)
    return found


def parse(config: Mapping[str, Any], where: str) -> Architecture:
    """The architecture that `config` describes; `where` begins its errors."""
    kind = str(config.get("model_type"))
    if kind not in _DEFAULTS:
        raise UserError(f"{where}: model_type is {kind!r}", "give a directory of an OLMoE or Qwen3-MoE model")
    for key, wanted in _ONLY.items():
        if config.get(key, wanted) != wanted:
            raise UserError(
                f"{where}: {key} is {config[key]!r}, and only {wanted!r} is computed here",
                "give a model without it",
            )
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise UserError(f"{where}: rope_parameters is {rope!r}, no object", _AGAIN)
    if rope.get("rope_type", "default") != "default":
        raise UserError(
            f"{where}: its positions are of type {rope['rope_type']!r} (rope_parameters)",
            "give a model with plain rotary positions",
        )
    try:
        found = _parsed(kind, {**_DEFAULTS[kind], **config}, rope)
    except KeyError as error:
        raise UserError(f"{where}: it has no {error.args[0]}", _AGAIN) from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{where}: {error}", _AGAIN) from None
    _check(found, where)
    return found


def _parsed(kind: Any, config: Mapping[str, Any], rope: Mapping[str, Any]) -> Architecture:
    width, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    if layers > _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers}")
    qwen = kind == "qwen3_moe"
    # transformers 5 may save it under the name that its other mixtures use.
    experts = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    step, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    sparse = tuple(not qwen or (layer not in dense and (layer + 1) % step == 0) for layer in range(layers))
    return Architecture(
        kind=kind,
        vocabulary=int(config["vocab_size"]),
        width=int(width),
        heads=int(heads),
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_width=int(config.get("head_dim") or width // heads),
        experts=int(experts),
        top_k=int(config["num_experts_per_tok"]),
        expert_width=int(config["moe_intermediate_size"] if qwen else config["intermediate_size"]),
        dense_width=int(config["intermediate_size"]) if qwen else 0,
        sparse=sparse,
        normalise=bool(config["norm_topk_prob"]),
        qk_norm="head" if qwen else "full",
        eps=float(config["rms_norm_eps"]),
        theta=float(rope.get("rope_theta") or config.get("rope_theta") or 1e4),
        context=int(config["max_position_embeddings"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        clip=None if config.get("clip_qkv") is None else float(config["clip_qkv"]),
        ends=_ends(config.get("eos_token_id")),
    )


def _check(found: Architecture, where: str) -> None:
    sizes = (
        "vocabulary", "width", "heads", "kv_heads", "head_width", "experts", "top_k", "expert_width", "layers", "context",
    )  # fmt: skip
    for name in sizes:
        if getattr(found, name) < 1:
            raise UserError(f"{where}: {name} is {getattr(found, name)}", _AGAIN)
    for name in ("eps", "theta"):
        if not 0 < getattr(found, name) < math.inf:
            raise UserError(f"{where}: {name} is {getattr(found, name)}, not above 0", _AGAIN)
    if found.top_k > found.experts:
        raise UserError(
            f"{where}: a token goes to {found.top_k} experts, and there are {found.experts}", _AGAIN
        )
    if found.heads % found.kv_heads or found.head_width % 2:
        raise UserError(
            f"{where}: {found.heads} heads of {found.head_width} share {found.kv_heads} key heads unevenly",
            _AGAIN,
        )
    if not found.mixtures:
        raise UserError(f"{where}: no layer has experts", "give a Mixture-of-Experts model")


def _with_ends(found: Architecture, more: tuple[int, ...]) -> Architecture:
    return replace(found, ends=tuple(sorted({*found.ends, *more})))


def _ends(given: Any) -> tuple[int, ...]:
    if given is None:
        return ()
    return tuple(sorted(map(int, given))) if isinstance(given, list) else (int(given),)


def require_context(found: Architecture, tokens: int) -> None:
    """Refuse a text of `tokens` tokens, a prompt's and those that follow, where the model reads fewer."""
    if tokens > found.context:
        raise UserError(
            f"{tokens} tokens are beyond the model's context of {found.context}",
            "give shorter prompts, or ask for fewer tokens",
        )


def _object(file: Path, remedy: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} does not exist", remedy) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{file} cannot be read: {why}", _AGAIN) from None
    if not isinstance(found, dict):
        raise UserError(f"{file} holds no object", _AGAIN)
    return found


_SHAPES: Mapping[str, Architecture] = {
    "olmoe-1b-7b": Architecture(
        kind="olmoe", vocabulary=50304, width=2048, heads=16, kv_heads=16, head_width=128, experts=64, top_k=8,
        expert_width=1024, dense_width=0, sparse=(True,) * 16, normalise=False, qk_norm="full", eps=1e-5, theta=1e4,
        context=4096, tied=False, clip=None,
    ),
    "qwen3-30b-a3b": Architecture(
        kind="qwen3_moe", vocabulary=151936, width=2048, heads=32, kv_heads=4, head_width=128, experts=128, top_k=8,
        expert_width=768, dense_width=6144, sparse=(True,) * 48, normalise=True, qk_norm="head", eps=1e-6, theta=1e6,
        context=40960, tied=False, clip=None,
    ),
    "tiny": Architecture(
        kind="olmoe", vocabulary=256, width=64, heads=4, kv_heads=4, head_width=16, experts=8, top_k=2,
        expert_width=128, dense_width=0, sparse=(True,) * 3, normalise=False, qk_norm="full", eps=1e-5, theta=1e4,
        context=256, tied=False, clip=None,
    ),
}  # fmt: skip


def named(name: str, layers: int | None = None) -> Architecture:
    """A published model's shape, for random weights: timing does not depend on what a model has learned. `layers` cuts it."""
    if name not in _SHAPES:
        raise UserError(f"there is no model shape {name!r}", nearest(name, _SHAPES))
    found = _SHAPES[name]
    if layers is not None and layers > found.layers:
        raise UserError(f"{name} has {found.layers} layers, not {layers}", f"give at most {found.layers}")
    return replace(found, sparse=found.sparse[:layers])
