"""The workload `pool.fidelity`: a pool trained as asked, then each of its learners alone, and how far apart they are.

`same` compares bit for bit. A pack multiplies other shapes than a learner alone, and rounds otherwise; what it must not do
is learn otherwise. So here both trainings are one cell, and their distance is its metric: the relative norm of the
difference over each learner's concatenated A and B, and over its losses. Most of an adapter is A as it was drawn, so the
distance over what was learned, against where the adapter started, is told too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.workload import dpo
from coresident.errors import MachineError
from coresident.workload import Metric, Reporter, Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

METRICS = (
    Metric("adapter_distance", "1", "less", "largest over learners: ||A,B - A,B alone|| / ||A,B alone||"),
    Metric("update_distance", "1", "less", "the same of B alone, which starts at zero: of what was learned"),
    Metric("loss_distance", "1", "less", "largest over learners: the same of the series of losses"),
    Metric(
        "outcomes_differ",
        "1",
        "less",
        "learners that ended otherwise than alone: at another step, or for another reason",
    ),
    Metric("learners_done", "1", None, "learners that trained every step they had"),
    Metric("learners_stopped", "1", None, "learners that stopped because a number was not finite"),
)


@dataclass(frozen=True)
class Trained:
    """What a training left: series and adapters by learner, and why those stopped that did."""

    losses: Mapping[int, Sequence[float]]
    adapters: Mapping[int, Path]
    failed: Mapping[str, str]


def run(parameters: DPO, cell: Reporter) -> None:
    """Train both and report. Raises what `pool.dpo` raises; a learner that stops is an outcome here, not an end."""
    asked = parameters.model_copy(update={"on_failure": "continue"})
    alone = asked.model_copy(update={"sharing": "none", "schedule": "solo", "step": "auto"})
    with cell.phase("as asked"):
        one = trained(asked, cell, "asked")
    with cell.phase("alone"):
        other = trained(alone, cell, "alone")
    told = compare(one, other)
    for name, value in told.items():
        cell.metric(name, value, "1")
    for control in _events(cell.work / "asked" / "events", "control"):
        cell.control(
            control["name"], control["asked"], control["ran"], control["passed"], control.get("reason", "")
        )
    cell.environment({"stopped": {"as asked": dict(one.failed), "alone": dict(other.failed)}})


def trained(parameters: DPO, cell: Reporter, name: str) -> Trained:
    """One of the two trainings, in a place of its own below the cell's."""
    from coresident.engines.pool.learning.outputs import last_good
    from coresident.engines.pool.run import drive

    place = cell.work / name
    work = place / "work"
    found = drive(parameters, Reporter(place / "events", work, device=cell.device, cpus=cell.cpus))
    series = {event["name"]: event["values"] for event in _events(place / "events", "series")}
    numbers = range(parameters.learners)
    adapters = {}
    for number in numbers:
        stopped = f"learner {number}" in found.failed
        adapters[number] = last_good(work, number) if stopped else work / f"learner-{number}"
    return Trained(
        {number: series[f"learner-{number}.loss"] for number in numbers},
        adapters,
        {member: casualty.reason for member, casualty in found.failed.items()},
    )


def compare(one: Trained, other: Trained) -> dict[str, float]:
    """The metrics. Raises MachineError where an adapter cannot be compared with its learner's alone."""
    adapters, updates, losses = [0.0], [0.0], [0.0]
    differ = 0
    for number in sorted(other.losses):
        member = f"learner {number}"
        same_end = len(one.losses[number]) == len(other.losses[number])
        if not same_end or one.failed.get(member) != other.failed.get(member):
            differ += 1
            continue
        losses.append(distance([_row(one.losses[number])], [_row(other.losses[number])]))
        mine, theirs = _tensors(one.adapters[number]), _tensors(other.adapters[number])
        if mine.keys() != theirs.keys() or any(mine[name].shape != theirs[name].shape for name in mine):
            raise MachineError(
                f"{one.adapters[number]} has other tensors than {other.adapters[number]}",
                "run the cell again",
            )
        names = sorted(mine)
        adapters.append(distance([mine[name] for name in names], [theirs[name] for name in names]))
        learned = [name for name in names if ".lora_B." in name]
        updates.append(distance([mine[name] for name in learned], [theirs[name] for name in learned]))
    return {
        "adapter_distance": max(adapters),
        "update_distance": max(updates),
        "loss_distance": max(losses),
        "outcomes_differ": differ,
        "learners_done": len(one.losses) - len(one.failed),
        "learners_stopped": len(one.failed),
    }


def distance(ours: Iterable[NDArray[Any]], alone: Iterable[NDArray[Any]]) -> float:
    """||ours - alone|| / ||alone|| over all numbers of all arrays; 0 where both are zero."""
    apart = total = 0.0
    for left, right in zip(ours, alone, strict=True):
        wide, beside = left.astype("float64"), right.astype("float64")
        apart += float(((wide - beside) ** 2).sum())
        total += float((beside**2).sum())
    if not total:
        return 0.0 if not apart else math.inf
    return math.sqrt(apart / total)


def _row(values: Sequence[float]) -> NDArray[Any]:
    import numpy

    return numpy.array(values, dtype="float64")


def _tensors(adapter: Path) -> dict[str, NDArray[Any]]:
    from safetensors.numpy import load_file

    from coresident.engines.pool.learning.outputs import WEIGHTS

    tensors: dict[str, NDArray[Any]] = load_file(adapter / WEIGHTS)
    return tensors


def _events(place: Path, kind: str) -> list[dict[str, Any]]:
    lines = (
        line for file in sorted(place.iterdir()) for line in file.read_text(encoding="utf-8").splitlines()
    )
    return [event for event in map(json.loads, lines) if event["event"] == kind]


fidelity = Workload(
    name="pool.fidelity",
    about="how far the learners of a pool end from the same learners alone",
    parameters=DPO,
    metrics=METRICS,
    controls=dpo.controls,
    run=run,
    inspect=dpo.inspect,
)
