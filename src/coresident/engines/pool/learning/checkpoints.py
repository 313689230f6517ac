"""One learner's state in one file, from which training goes on as if it had never stopped, bit for bit.

A safetensors file holds adapter, optimiser and series; its header their checksum, and a JSON text with what they belong to:
the base's checksum, the data's, and the parameters that the numbers follow from. Nothing of it can run code. It is written
aside, made durable and renamed, so that there is always one whole file: the new one or the one before.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from coresident.engines.pool.learning.adapter import digest
from coresident.engines.pool.learning.tokenized import Tokenized
from coresident.engines.pool.parameters import DPO
from coresident.errors import MachineError, UserError

if TYPE_CHECKING:
    from torch import Tensor

    from coresident.engines.pool.learning.learner import Learner

# What the numbers of a training follow from; the rest (how the base is shared, how often to save) may change.
FOLLOWED = (
    "loss",
    "start_from",
    "held_to",
    "dtype",
    "batch",
    "max_length",
    "beta",
    "learning_rate",
    "warmup_steps",
    "weight_decay",
    "clip",
    "optimizer",
    "adapter_products",
    "rank",
    "alpha",
    "targets",
    "seed",
    "threads",
)


def identity(settings: DPO, data: Tokenized, base: str) -> dict[str, str]:
    """What a state belongs to, as texts: it may only be continued with the same."""
    told = settings.model_dump(mode="json", include=set(FOLLOWED))
    lines = "\n".join(map(repr, data.pairs))
    return {
        **{name: json.dumps(told.get(name, getattr(settings, name))) for name in FOLLOWED},
        "base": base,
        "data": hashlib.sha256(lines.encode()).hexdigest(),
    }


def save(file: Path, learner: Learner, belongs: Mapping[str, str]) -> None:
    """Write the learner's state. Raises MachineError where it cannot be; what was there then stays."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in _trained(learner):
        tensors[f"adapter.{name}"] = parameter.detach()
        for part, value in learner.optimizer.state[parameter].items():
            tensors[f"optimizer.{part}.{name}"] = value
    write(file, tensors, learner.series, belongs)


def write(
    file: Path, learned: Mapping[str, Tensor], series: Mapping[str, list[float]], belongs: Mapping[str, str]
) -> None:
    """Write what was `learned`, its `series`, and the random state of now. Raises MachineError where it cannot be; what was
    there then stays.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {f"random.{name}": state for name, state in _random().items()}
    tensors |= {
        f"series.{name}": torch.tensor(values, dtype=torch.float64) for name, values in series.items()
    }
    tensors |= learned
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        described = {"coresident": json.dumps(dict(belongs), sort_keys=True), "sha256": digest(host)}
        save_file(host, aside, metadata=described)
        with aside.open("rb") as stream:
            os.fsync(stream.fileno())
        aside.replace(file)
    except (OSError, SafetensorError) as error:
        raise MachineError(
            f"the checkpoint {file} cannot be written: {error}",
            "free space there and repeat with --resume: the one before is kept",
        ) from error
    finally:
        aside.unlink(missing_ok=True)


def read(file: Path, belongs: Mapping[str, str]) -> dict[str, Tensor]:
    """What `write` wrote. Raises UserError where it is damaged, or belongs to other parameters, data or another base."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(file, framework="pt") as stored:
            described: dict[str, str] = stored.metadata()
            found: dict[str, str] = json.loads(described["coresident"])
            for name in stored.keys():  # noqa: SIM118 - it is no mapping
                tensors[name] = stored.get_tensor(name)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} is no checkpoint of ours ({' '.join(str(error).split())})",
            "remove it to start that learner anew",
        ) from None
    # One from before checksums were kept has none.
    if described.get("sha256") not in (None, digest(tensors)):
        raise UserError(
            f"{file} is damaged: its tensors have another checksum than its header says",
            "put it back from a copy, or remove it to start that learner anew",
        )
    found = {"optimizer": json.dumps("adamw"), "adapter_products": json.dumps("float32")} | found
    _check(file, found, belongs)
    return tensors


def restore(file: Path, learner: Learner, belongs: Mapping[str, str]) -> None:
    """Put a saved state into a learner that was built as the saved one was.

    Raises UserError where the state belongs to other parameters, data or another base.
    """
    tensors = read(file, belongs)
    for name, values in learner.series.items():
        values[:] = tensors[f"series.{name}"].tolist()
    with torch.no_grad():
        for name, parameter in _trained(learner):
            parameter.copy_(tensors[f"adapter.{name}"])
            # Small parameters may have other parts than large ones.
            parts = {
                key.split(".")[1]: value
                for key, value in tensors.items()
                if key.startswith("optimizer.") and key.endswith(f".{name}")
            }
            learner.optimizer.state[parameter] = {
                part: _beside(parameter, part, value, learner) for part, value in parts.items()
            }
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and _card_in_use():
        torch.cuda.set_rng_state(tensors["random.cuda"])


def _check(file: Path, found: Mapping[str, str], belongs: Mapping[str, str]) -> None:
    for name, value in belongs.items():
        if found.get(name) == value:
            continue
        if name == "base":
            moved = value.split()[0] != found.get(name, "host").split()[0]
            said = "it was made on another kind of device" if moved else "the base has changed since"
            remedy = "go on where it was started" if moved else "give the base it was started with, unchanged"
        elif name == "optimizer" and "adamw8bit" in value and "adamw8bit" in found.get(name, ""):
            said = "moments in 8 bits go on neither in a pack from elsewhere nor elsewhere from a pack"
            remedy = "set sharing back"
        elif name == "data":
            said, remedy = "its data have changed since", "give the data it was started with, unchanged"
        else:
            said = f"{name} was {found.get(name)} and is now {value}"
            remedy = f"set {name} back"
        raise UserError(f"{file} cannot be continued: {said}", f"{remedy}, or start anew in another --out")


def _beside(parameter: Tensor, part: str, value: Tensor, learner: Learner) -> Tensor:
    # A plain optimiser keeps its count on the host, a fused one beside the parameter.
    if part == "step" and not learner.optimizer.defaults["fused"]:
        return value
    return value.to(parameter.device)


def _trained(learner: Learner) -> list[tuple[str, Tensor]]:
    named = learner.model.named_parameters()
    return [(name, parameter) for name, parameter in named if parameter.requires_grad]


def _random() -> dict[str, Tensor]:
    found = {"cpu": torch.get_rng_state()}
    if _card_in_use():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _card_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
