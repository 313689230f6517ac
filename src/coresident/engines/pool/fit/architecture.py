"""The sizes of a model that decide its memory, read from its `config.json`. Only families whose layers are known here,
tensor by tensor, are taken: a guess would look like a figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coresident.errors import UserError

# Layers of RMSNorm, attention with rotary positions and grouped keys, and a gated SiLU block.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Architecture:
    """`keys` is the width of all key heads, `queries` of all query heads; `normed` says whether both are normalised."""

    layers: int
    width: int
    queries: int
    keys: int
    heads: int
    hidden: int
    vocabulary: int
    normed: bool

    def projections(self) -> dict[str, tuple[int, int]]:
        """The linear layers of one layer: (in, out) by the end of their names."""
        return {
            "q_proj": (self.width, self.queries),
            "k_proj": (self.width, self.keys),
            "v_proj": (self.width, self.keys),
            "o_proj": (self.queries, self.width),
            "gate_proj": (self.width, self.hidden),
            "up_proj": (self.width, self.hidden),
            "down_proj": (self.hidden, self.width),
        }


def of(config: Mapping[str, Any], where: str) -> Architecture:
    """Read it. Raises UserError for a family that is not known here, or a configuration that lacks a size."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UserError(
            f"{where}: model_type is {family!r}, whose memory coresident cannot foretell",
            f"measure it instead: pool train with few steps; known families: {', '.join(FAMILIES)}",
        )
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(
            f"{where}: hidden_act is {config['hidden_act']!r}, and only silu's memory is known",
            "measure it instead: pool train with few steps",
        )
    try:
        heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
        head = int(config.get("head_dim") or width // heads)
        return Architecture(
            layers=int(config["num_hidden_layers"]),
            width=width,
            queries=heads * head,
            keys=int(config.get("num_key_value_heads") or heads) * head,
            heads=heads,
            hidden=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            normed=family == "qwen3",
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{where} lacks a size or has one that is none ({error})", "fetch it again") from None


def check_packed(config: Mapping[str, Any], longest: int) -> None:
    """Raise UserError for a base that a pack refuses whose longest sequence may have `longest` tokens (`Policy.check`): some
    layer attends within a window.
    """
    family, layers = config["model_type"], int(config["num_hidden_layers"])
    slides = family == "mistral" or bool(config.get("use_sliding_window"))
    if family != "mistral" and slides:
        kinds = config.get("layer_types") or ["sliding_attention"] * (
            layers - int(config.get("max_window_layers", 28))
        )
        slides = "sliding_attention" in kinds
    window = config.get("sliding_window", 4096) if slides else None
    if isinstance(window, int) and window < longest:
        raise UserError(
            f"--arm packed: a pack has plain causal attention, and this base attends within {window} of {longest} tokens",
            f"say --set max_length={window}, or use another arm for this base",
        )
