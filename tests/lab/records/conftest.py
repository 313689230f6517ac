"""Records to order: whole ones, of which each test names only what it is about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coresident.lab.records.schema import Block, CellRef, Conditions, MetricValue, Record, StudyRef
from coresident.lab.records.store import Store
from coresident.lab.study.cells import Cell, digest


def make_cell(arm: str, **parameters: Any) -> Cell:
    asked = {"arm": arm, **parameters}
    hashed = digest(asked)
    return Cell(f"{arm}-{hashed[:8]}", "toy", arm, {"learners": 2}, asked, hashed)


def make_record(
    cell: Cell,
    repetition: int = 0,
    generation: int = 0,
    attempt: int = 1,
    status: Any = "ok",
    conditions: str = "c1",
    members: tuple[Cell, ...] | None = None,
    speed: float = 1.0,
    **values: Any,
) -> Record:
    whole: dict[str, Any] = {
        "study": StudyRef(name="scale", fingerprint="f" * 64),
        "cell": CellRef(
            id=cell.id,
            workload=cell.workload,
            arm=cell.arm,
            factors=dict(cell.factors),
            parameters=dict(cell.parameters),
            hash=cell.hash,
        ),
        "conditions": Conditions(hash=conditions, values={"driver": conditions}),
        "block": Block(
            repetition=repetition,
            generation=generation,
            members=[member.id for member in members or (cell,)],
            position=0,
        ),
        "attempt": attempt,
        "status": status,
        "started": f"2026-01-01T00:{repetition:02}:{10 * generation + attempt:02}+00:00",
        "duration": 1.5,
        "metrics": {"speed": MetricValue(value=speed, unit="1/s")},
    }
    return Record(**{**whole, **values})


@pytest.fixture
def cell() -> Callable[..., Cell]:
    return make_cell


@pytest.fixture
def record() -> Callable[..., Record]:
    return make_record


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "run")
