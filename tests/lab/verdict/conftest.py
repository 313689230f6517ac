"""A small study and its records, built directly: what the verdict's tests judge."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from coresident.lab.records.schema import (
    Block,
    CellRef,
    Conditions,
    Control,
    MetricValue,
    Record,
    Retraction,
    Series,
    StudyRef,
)
from coresident.lab.study.cells import Cell, digest
from coresident.lab.study.schema import Study
from coresident.lab.verdict import judge as judging
from coresident.lab.verdict.model import Judged, Verdict

RATIO = {
    "claim": "fork keeps native throughput",
    "metric": "speed",
    "compare": {"arm": "fork", "to": "native"},
    "expect": {"ratio": {"at_least": 0.95}},
}


@dataclass
class Lab:
    """A study with its cells, and the records that a test adds to it, each a minute after the last."""

    hypotheses: Mapping[str, Any]
    factors: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    arms: Sequence[str] = ("native", "fork")
    settings: Mapping[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    retracted: dict[str, str] = field(default_factory=dict)

    @property
    def study(self) -> Study:
        text = {
            "study": "a-study",
            "question": "Does it pay?",
            "workload": "command",
            "arms": {arm: {} for arm in self.arms},
            "factors": {factor: list(levels) for factor, levels in self.factors.items()},
            "hypotheses": self.hypotheses,
            **self.settings,
        }
        return Study.model_validate_json(json.dumps(text))

    @property
    def cells(self) -> list[Cell]:
        points = [
            dict(zip(self.factors, levels, strict=True))
            for levels in itertools.product(*self.factors.values())
        ]
        return [self._cell(arm, point) for point in points for arm in self.arms]

    def _cell(self, arm: str, at: Mapping[str, Any]) -> Cell:
        hashed = digest([arm, dict(at)])
        name = "-".join([arm, *(f"{factor}-{level}" for factor, level in at.items()), hashed[:8]])
        return Cell(id=name, workload="command", arm=arm, factors=dict(at), parameters={}, hash=hashed)

    def add(
        self,
        arm: str,
        repetition: int,
        metrics: Mapping[str, float] | None = None,
        *,
        at: Mapping[str, Any] | None = None,
        status: str = "ok",
        generation: int = 0,
        unit: str = "1/s",
        conditions: Mapping[str, str] | None = None,
        series: Mapping[str, Sequence[float]] | None = None,
        digests: Mapping[str, str] | None = None,
        failed_control: str = "",
        controls: Mapping[str, Control] | None = None,
    ) -> Record:
        cell = self._cell(arm, at or {})
        values = dict(conditions or {"driver": "1"})
        earlier = [r for r in self.records if r.cell.hash == cell.hash and r.block.repetition == repetition]
        when = len(self.records)
        control = Control(asked="on", ran="off", state="failed", reason="measured off")
        record = Record(
            study=StudyRef(name="a-study", fingerprint="f"),
            cell=CellRef(
                id=cell.id, workload="command", arm=arm, factors=dict(at or {}), parameters={}, hash=cell.hash
            ),
            conditions=Conditions(hash=digest(values), values=values),
            block=Block(
                repetition=repetition,
                generation=generation,
                members=sorted(cell.id for cell in self.cells),
                position=0,
            ),
            attempt=len(earlier) + 1,
            status=status,
            started=f"2025-01-01T{when // 60:02}:{when % 60:02}:00Z",
            duration=1.0,
            metrics={name: MetricValue(value=value, unit=unit) for name, value in (metrics or {}).items()},
            series={name: _series(values) for name, values in (series or {}).items()},
            digests=dict(digests or {}),
            controls={failed_control: control} if failed_control else dict(controls or {}),
        )
        self.records.append(record)
        return record

    def pairs(self, ratios: Iterable[float], base: float = 100.0, **others: Any) -> Lab:
        """A block for each ratio: native measures `base`, fork that many times as much."""
        for repetition, ratio in enumerate(ratios):
            self.add("native", repetition, {"speed": base}, **others)
            self.add("fork", repetition, {"speed": base * ratio}, **others)
        return self

    def verdict(self, post_hoc: Sequence[str] = ()) -> Verdict:
        active = [record for record in self.records if record.id not in self.retracted]
        gone = [
            (record, Retraction(record=record.id, reason=self.retracted[record.id], date="2025-01-02"))
            for record in self.records
            if record.id in self.retracted
        ]
        return judging.judge(self.study, self.cells, active, post_hoc, gone)

    def judged(self, name: str = "H1") -> Judged:
        return next(one for one in self.verdict().hypotheses if one.name == name)

    def wide(self) -> list[str]:
        return judging.wide(self.study, self.cells, self.records)


def _series(values: Sequence[float]) -> Series:
    hashed = hashlib.sha256(repr(list(values)).encode()).hexdigest()
    return Series(digest=hashed, length=len(values), values=list(values))


@pytest.fixture
def lab() -> type[Lab]:
    return Lab


@pytest.fixture
def ratio() -> dict[str, Any]:
    """A hypothesis: fork's speed is at least 0.95 of native's."""
    return json.loads(json.dumps(RATIO))
