"""The named shapes: what a base looks like when only its size matters, as `Qwen2Config` of transformers
spells it.

`tiny` is for tests and `small` for the demo on a bare machine; the others are the published shapes of Qwen2.5
(their `config.json`), so that memory and speed are those of the real models although the weights are random.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Ids a byte-level BPE of our own text needs; what a model's table has beyond them is never looked up.
TOKENS = {"tiny": 512}
TOKENS_OTHERWISE = 4096

_COMMON: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "use_sliding_window": False,
    "attention_dropout": 0.0,
}


def _shape(
    *,
    vocabulary: int,
    width: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    tied: bool,
    positions: int,
) -> dict[str, Any]:
    return _COMMON | {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        "max_position_embeddings": positions,
    }


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": _shape(
        vocabulary=512, width=64, hidden=128, layers=2, heads=4, kv_heads=2, tied=True, positions=2048
    ),
    # 25.3 M parameters, 101 MB in float32: enough for a copy to show, little enough for a step under a
    # second.
    "small": _shape(
        vocabulary=8192, width=768, hidden=2048, layers=4, heads=12, kv_heads=2, tied=False, positions=4096
    ),
    "qwen2.5-0.5b": _shape(
        vocabulary=151936, width=896, hidden=4864, layers=24, heads=14, kv_heads=2, tied=True, positions=32768
    ),
    "qwen2.5-1.5b": _shape(
        vocabulary=151936,
        width=1536,
        hidden=8960,
        layers=28,
        heads=12,
        kv_heads=2,
        tied=True,
        positions=32768,
    ),
    "qwen2.5-7b": _shape(
        vocabulary=152064,
        width=3584,
        hidden=18944,
        layers=28,
        heads=28,
        kv_heads=4,
        tied=False,
        positions=32768,
    ),
}


@dataclass(frozen=True)
class Weight:
    """A tensor of a named shape: `kind` says how a fresh one is drawn."""

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


def weights(config: Mapping[str, Any]) -> Iterator[Weight]:
    """Every tensor a checkpoint of this Qwen2 shape holds, in the order they are written.

    Names and shapes are those of `Qwen2ForCausalLM.state_dict()`; a tied output layer has no tensor of its
    own.
    """
    width, hidden = config["hidden_size"], config["intermediate_size"]
    head = width // config["num_attention_heads"]
    key_value = head * config["num_key_value_heads"]
    yield Weight("model.embed_tokens.weight", (config["vocab_size"], width), "normal")
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for projection, out in (("q", width), ("k", key_value), ("v", key_value)):
            yield Weight(f"{at}.self_attn.{projection}_proj.weight", (out, width), "normal")
            yield Weight(f"{at}.self_attn.{projection}_proj.bias", (out,), "zeros")
        yield Weight(f"{at}.self_attn.o_proj.weight", (width, width), "normal")
        yield Weight(f"{at}.mlp.gate_proj.weight", (hidden, width), "normal")
        yield Weight(f"{at}.mlp.up_proj.weight", (hidden, width), "normal")
        yield Weight(f"{at}.mlp.down_proj.weight", (width, hidden), "normal")
        yield Weight(f"{at}.input_layernorm.weight", (width,), "ones")
        yield Weight(f"{at}.post_attention_layernorm.weight", (width,), "ones")
    yield Weight("model.norm.weight", (width,), "ones")
    if not config["tie_word_embeddings"]:
        yield Weight("lm_head.weight", (config["vocab_size"], width), "normal")
