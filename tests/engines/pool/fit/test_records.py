"""What is foretold is what was measured: every pool on a card in the published records, within 2 % of its peak."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from coresident.engines.pool import sizes
from coresident.engines.pool.base import base, shapes
from coresident.engines.pool.fit import architecture, data
from coresident.engines.pool.fit.forward import Rows
from coresident.engines.pool.fit.predict import ARMS, Predictor
from coresident.engines.pool.parameters import DPO

EVIDENCE = Path(__file__).parents[4] / "evidence" / "h200"
MIB = 2**20
TOLERANCE = 0.02
# MiB in all, as NVML tells it.
MEMORY = {"NVIDIA H200": 143_771}
# The records' data are Python's own documentation, and Python's versions differ. So these are the records' own rows, by study,
# source, batch and longest sequence: of each learner [sequences, width, scored, padding] step by step.
KEPT: dict[str, list[list[list[int]]]] = json.loads(
    Path(__file__).with_name("rows.json").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class Cell:
    """One that was measured on a card and ended well: its `peak` is in MiB, `tokens` are each learner's real ones in each of
    its steps.
    """

    study: str
    settings: DPO
    peak: float
    tokens: list[list[int]]

    @property
    def data(self) -> str:
        """What its rows are made of: the same for all arms of a study that are given the same."""
        asked = self.settings
        return f"{self.study}/{asked.data.source}/{asked.batch}x{asked.max_length}"

    def rows(self) -> list[list[Rows]]:
        """What its learners were given; if that is not kept, what they would be given here."""
        if self.data in KEPT:
            return [[Rows(*one) for one in learner] for learner in KEPT[self.data]]
        # The number of learners changes none of them.
        alike = {"learners": data.LEARNERS, "sharing": "fork", "mps": "off", "schedule": "together"}
        return looked_up(self.settings.model_copy(update=alike).model_dump_json())

    def has_its_own_rows(self) -> bool:
        """Whether `rows` are as long as those that were trained on."""
        return all(
            [one.real for one in rows[: len(told)]] == told[: len(rows)]
            for rows, told in zip(self.rows(), self.tokens, strict=False)
        )


def recorded() -> Iterator[tuple[str, Cell]]:
    """Each cell once, by its name, with the median of its peaks: a run that compiles its kernels takes some more."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(EVIDENCE.glob("*/records/*.json")):
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        cell = record["cell"]
        asked = cell["parameters"]
        if record["status"] != "ok" or cell["workload"] != "pool.dpo":
            continue
        if asked["sharing"] in ARMS.values() and asked["base"].get("config"):
            found.setdefault(f"{record['study']['name']}/{cell['id']}", []).append(record)
    for name, records in found.items():
        record = records[0]
        settings = DPO.model_validate_json(json.dumps(record["cell"]["parameters"]))
        tokens = [
            [int(count) for count in record["series"][f"learner-{number}.tokens"]["values"][: data.STEPS]]
            for number in range(settings.learners)
        ]
        peak = median(one["telemetry"]["peak_device_memory_mib"] for one in records)
        yield name, Cell(record["study"]["name"], settings, peak, tokens)


CELLS = dict(recorded())


@cache
def looked_up(told: str) -> list[list[Rows]]:
    return data.looked_up(DPO.model_validate_json(told))


def predictor_of(cell: Cell) -> Predictor:
    """One for all numbers of learners."""
    return _predictor(cell.data, cell.settings.model_copy(update={"learners": 8}).model_dump_json())


@cache
def _predictor(source: str, told: str) -> Predictor:
    settings = DPO.model_validate_json(told)
    config = settings.base.config
    assert config is not None
    return Predictor(
        settings,
        architecture.of(shapes.SHAPES[config], config),
        base.estimate(settings.base, settings.dtype),
        settings.base.quantise == "nf4",
        next(cell for cell in CELLS.values() if cell.data == source).rows(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_the_peak_of_every_recorded_pool_is_foretold(name: str) -> None:
    cell = CELLS[name]
    assert cell.data not in KEPT or cell.has_its_own_rows(), "these rows are not what was trained on"
    found = predictor_of(cell).at(cell.settings.learners)
    assert found.total / MIB == pytest.approx(cell.peak, rel=TOLERANCE), found.parts
    assert sum(found.parts.values()) == found.total


def test_what_ran_out_of_memory_is_foretold_not_to_fit() -> None:
    found = []
    for file in sorted(EVIDENCE.glob("*/records/*.json")):
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if record["status"] != "oom" or record["cell"]["workload"] != "pool.dpo":
            continue
        settings = DPO.model_validate_json(json.dumps(record["cell"]["parameters"]))
        if settings.sharing not in ARMS.values():
            continue
        card = MEMORY[record["environment"]["device"]["name"]] * MIB
        room = card if settings.device_memory is None else sizes.parse(settings.device_memory)
        predictor = predictor_of(Cell(record["study"]["name"], settings, 0.0, []))
        assert predictor.at(settings.learners).total > room, file.name
        found.append((settings.sharing, settings.learners))
    assert {("none", 4), ("none", 5), ("fork", 64)} <= set(found)


def test_there_are_records_to_be_held_to() -> None:
    arms = {(cell.settings.sharing, cell.settings.mps, cell.settings.learners) for cell in CELLS.values()}
    assert {("none", "off", 8), ("fork", "off", 8), ("fork", "on", 16), ("none", "on", 16)} <= arms
    # Where packs grow, their slope is foretold too.
    assert {("packed", "off", learners) for learners in (8, 16, 32, 64)} <= arms
