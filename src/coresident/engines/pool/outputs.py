"""Where a training keeps what: the names that its learners and whoever leads them agree on. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coresident.engines.pool.tensors import header
from coresident.errors import UserError

METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints"
# A file whose presence asks every learner to keep its state after the current step, and to leave.
STOP = "stop"
# An adapter's files as PEFT names them, and what it was trained on, which PEFT has no field for.
WEIGHTS, CONFIG, ORIGIN = "adapter_model.safetensors", "adapter_config.json", "coresident.json"
# What would make an adapter more than x A' B' on top of a layer.
_SPECIAL = (
    "use_dora",
    "use_rslora",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
)


def checkpoint(work: Path, number: int) -> Path:
    """Where learner `number`'s state is."""
    return work / CHECKPOINTS / f"learner-{number}.safetensors"


def steps_of(file: Path) -> int:
    """How many steps a checkpoint holds, without loading it; 0 where there is none."""
    if not file.is_file():
        return 0
    found = [stored.shape[0] for stored in header(file) if stored.name == "series.loss"]
    if not found:
        raise UserError(f"{file} is no checkpoint of ours", "remove it to start that learner anew")
    return found[0]


def described(adapter: Path) -> dict[str, Any]:
    """The `rank`, `alpha` and `targets` of a PEFT adapter's directory, as parameters. Raises UserError for one that
    is not a plain LoRA adapter.
    """
    file = adapter / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        rank, alpha, targets = config["r"], config["lora_alpha"], config["target_modules"]
        special = [name for name in _SPECIAL if config.get(name)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{file} describes no LoRA adapter", "give a directory that PEFT saved") from None
    if config.get("peft_type") != "LORA" or not isinstance(targets, list) or special:
        said = f"it has {special[0]}" if special else "it is of another kind or names its layers by a pattern"
        raise UserError(f"{file}: this is no plain LoRA adapter ({said})", "give a plain one")
    return {"rank": rank, "alpha": float(alpha), "targets": sorted(targets)}
