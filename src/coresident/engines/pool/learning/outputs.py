"""Where a training keeps what: the names that its learners and whoever leads them agree on. Needs no torch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coresident import whole
from coresident.engines.pool.base.tensors import header
from coresident.engines.pool.parameters import DPO
from coresident.errors import MachineError, UserError

if TYPE_CHECKING:
    from coresident.engines.pool.learning.learner import StepResult

METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints"
# A state that is to be a checkpoint, and what says that all that are to be at once are written.
_NEXT, _WHOLE = ".next", ".whole"
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


def note(work: Path, line: Mapping[str, Any]) -> None:
    """Append a line to the metrics, in one write: lines of several learners do not mix. Raises MachineError where the disk
    takes only a part of it.
    """
    file = work / METRICS
    told = json.dumps(line, allow_nan=False).encode() + b"\n"
    try:
        with file.open("ab+", buffering=0) as stream:
            # Another's line is not to be seen half written. Without locks (some network disks) it may be, and an empty
            # line then comes behind it.
            with contextlib.suppress(OSError):
                fcntl.flock(stream, fcntl.LOCK_EX)
            size = stream.seek(0, os.SEEK_END)
            if size and os.pread(stream.fileno(), 1, size - 1) != b"\n":
                # Behind a line that a full disk tore.
                told = b"\n" + told
            if stream.write(told) < len(told):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise MachineError(
            f"{file} cannot be written: {error.strerror}", "free space there and repeat with --resume"
        ) from None


def noted(lines: bytes) -> list[dict[str, Any]]:
    """The objects of whole lines of the metrics; what a kill or a full disk tore is left out."""
    found = []
    for line in lines.split(b"\n"):
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def note_step(work: Path, number: int, result: StepResult) -> None:
    """A learner's step as a line of the metrics."""
    note(
        work,
        {"learner": number, **{name: value for name, value in asdict(result).items() if value is not None}},
    )


def next_checkpoint(work: Path, number: int) -> Path:
    """Where learner `number`'s state is written that becomes its checkpoint together with others'."""
    return checkpoint(work, number).with_suffix(f".safetensors{_NEXT}")


def take_over(work: Path, complete: bool = False) -> None:
    """Make what was written as next checkpoints the checkpoints, all of them or none: with `complete` since all are there now,
    without it if they were when a kill came.
    """
    place = work / CHECKPOINTS
    if not place.is_dir():
        return
    marker = place / _WHOLE
    try:
        if complete:
            whole.sync(place)
            marker.touch()
            whole.sync(place)
        for file in place.glob(f"*{_NEXT}"):
            if marker.exists():
                file.replace(file.with_suffix(""))
            else:
                file.unlink()
        if marker.exists():
            whole.sync(place)
            marker.unlink()
    except OSError as error:
        raise MachineError(
            f"the checkpoints in {place} cannot be renewed: {error.strerror}",
            "free space there and repeat with --resume: what is kept is whole",
        ) from None


def last_good(work: Path, number: int) -> Path:
    """Where the adapter of a learner that stopped being finite is, as it was before the step that was not."""
    return work / f"learner-{number}-last-good"


def steps_of(file: Path) -> int:
    """How many steps a checkpoint holds, without loading it; 0 where there is none."""
    if not file.is_file():
        return 0
    anew = "remove it to start that learner anew"
    try:
        found = [stored.shape[0] for stored in header(file) if stored.name == "series.loss"]
    except UserError as error:
        raise UserError(error.problem, anew) from None
    if not found:
        raise UserError(f"{file} is no checkpoint of ours", anew)
    return found[0]


def origin(adapter: Path) -> dict[str, Any]:
    """What an adapter's directory says of its `base` and its `steps`; nothing where others wrote it."""
    try:
        told = json.loads((adapter / ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def check_base(adapter: Path, base: str) -> None:
    """Raise UserError if the adapter says that it belongs to another base than the one with the identity `base`."""
    if origin(adapter).get("base", base) != base:
        raise UserError(
            f"the adapter {adapter} was trained on another base", "give the base that it was trained on"
        )


def check_start(parameters: DPO, base: str) -> None:
    """Raise UserError where `start_from` cannot be what learners over the base with the identity `base` go on from:
    it does not fit, belongs to another base, or is not zero while it is unsaid what the policy is held to.
    """
    adapter = Path(parameters.start_from or "")
    asked = {"rank": parameters.rank, "alpha": parameters.alpha, "targets": sorted(parameters.targets)}
    for name, value in described(adapter).items():
        if value != asked[name]:
            raise UserError(
                f"the adapter {adapter} has {name} {value}, and {asked[name]} was asked for",
                f"set {name} to {value}",
            )
    check_base(adapter, base)
    if parameters.loss == "dpo" and parameters.held_to is None and not zero(adapter):
        raise UserError(
            f"the adapter {adapter} is not zero, so that it must be said what the policy is held to",
            "say --reference base (the bare base) or --reference start (this adapter)",
        )


def zero(adapter: Path) -> bool:
    """Whether an adapter changes nothing: every B is zero."""
    file = adapter / WEIGHTS
    if not file.is_file():
        raise UserError(f"{adapter} has no {WEIGHTS}", "give a directory that PEFT saved")
    with file.open("rb") as stream:
        for stored in header(file):
            stream.seek(stored.offset)
            if ".lora_B." in stored.name and any(stream.read(stored.size)):
                return False
    return True


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
        raise UserError(
            f"{file} describes no LoRA adapter",
            "give a directory that PEFT saved; of a `pool train`, the learner-K in its --out",
        ) from None
    if config.get("peft_type") != "LORA" or not isinstance(targets, list) or special:
        said = f"it has {special[0]}" if special else "it is of another kind or names its layers by a pattern"
        raise UserError(f"{file}: this is no plain LoRA adapter ({said})", "give a plain one")
    return {"rank": rank, "alpha": float(alpha), "targets": sorted(targets)}
