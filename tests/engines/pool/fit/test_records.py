"""What is foretold is what was measured: every pool on a card in the published records, within 5 % of its peak."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from coresident.engines.pool.base import base, shapes
from coresident.engines.pool.fit import architecture, data
from coresident.engines.pool.fit.forward import Rows
from coresident.engines.pool.fit.predict import ARMS, Predictor
from coresident.engines.pool.parameters import DPO

EVIDENCE = Path(__file__).parents[4] / "evidence" / "h200"
MIB = 2**20
# A pool's learners differ, and their sum hardly does; of one learner at a time the largest batch of all decides, and
# the records' data are not quite these: they are Python's own documentation, and Python's versions differ.
TOLERANCE = {"together": 0.05, "solo": 0.10}
# A pack's step is one shape again and again, and its memory the same in every repetition.
OF_PACKS = 0.02
# One learner's steps depend on these alone.
ITS_OWN = (
    "base",
    "dtype",
    "data",
    "loss",
    "batch",
    "max_length",
    "steps",
    "deterministic",
    "sharing",
    "reference",
)


def recorded() -> Iterator[tuple[str, DPO, float]]:
    """Each cell that was measured on a card and ended well, once: its name, parameters and peak in MiB."""
    seen = set()
    for file in sorted(EVIDENCE.glob("*/records/*.json")):
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        cell = record["cell"]
        name = f"{record['study']['name']}/{cell['id']}"
        asked = cell["parameters"]
        if record["status"] != "ok" or cell["workload"] != "pool.dpo" or name in seen:
            continue
        if asked["sharing"] not in ARMS.values() or not asked["base"].get("config"):
            continue
        seen.add(name)
        settings = DPO.model_validate_json(json.dumps(asked))
        yield name, settings, record["telemetry"]["peak_device_memory_mib"]


CELLS = {name: (settings, peak) for name, settings, peak in recorded()}


@cache
def rows_of(told: str) -> list[list[Rows]]:
    return data.looked_up(DPO.model_validate_json(told))


@cache
def predictor(told: str) -> Predictor:
    settings = DPO.model_validate_json(told)
    # The number of learners changes none of them: eight are looked at.
    wanted = settings.model_copy(
        update={"learners": 8, "sharing": "fork", "mps": "off", "schedule": "together"}
    )
    config = settings.base.config
    assert config is not None
    return Predictor(
        settings,
        architecture.of(shapes.SHAPES[config], config),
        base.estimate(settings.base, settings.dtype),
        settings.base.quantise == "nf4",
        rows_of(wanted.model_dump_json()),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_the_peak_of_every_recorded_pool_is_foretold(name: str) -> None:
    settings, peak = CELLS[name]
    told = settings.model_copy(update={"learners": 8}).model_dump_json()
    found = predictor(told).at(settings.learners)
    tolerance = OF_PACKS if settings.sharing == "packed" else TOLERANCE[settings.schedule]
    assert found.total / MIB == pytest.approx(peak, rel=tolerance), found.parts
    assert sum(found.parts.values()) == found.total


def test_there_are_records_to_be_held_to() -> None:
    arms = {(settings.sharing, settings.mps, settings.learners) for settings, _ in CELLS.values()}
    assert {("none", "off", 8), ("fork", "off", 8), ("fork", "on", 16), ("none", "on", 16)} <= arms
    # Where packs grow, their slope is foretold too.
    assert {("packed", "off", learners) for learners in (8, 16, 32, 64)} <= arms
