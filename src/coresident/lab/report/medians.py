"""What was measured, beside what is claimed: every metric by factor levels and arm, without judgement."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coresident.lab.records.schema import Record
from coresident.lab.report import tables
from coresident.lab.report.tables import Table
from coresident.lab.study.cells import Cell, canonical
from coresident.lab.study.schema import Level
from coresident.lab.verdict import words
from coresident.lab.verdict.evidence import Evidence, by_cell, gather
from coresident.workload import Workload

if TYPE_CHECKING:
    from rich.console import Console

TITLE = "Measured: median [lowest–highest] over blocks; shown, not claimed"


@dataclass(frozen=True)
class Median:
    """One cell's metric over the blocks that count: ok records of the newest conditions, one a repetition.

    `values` are in `unit`; `incomplete` counts the attempts under the same conditions that gave none, by
    status.
    """

    values: tuple[float, ...]
    unit: str
    incomplete: Mapping[str, int]
    conditions: str | None

    def text(self, unit: bool = False, count: bool = True) -> str:
        """ "812 [798 - 824] n=3, 1 oom"; the unit and n only if asked for."""
        beside = ", ".join(f"{number} {status}" for status, number in self.incomplete.items())
        if not self.values:
            return beside or "-"
        low, high = words.number(min(self.values)), words.number(max(self.values))
        told = words.number(statistics.median(self.values))
        told = f"{told} {words.unit(self.unit)}".rstrip() if unit else told
        told += (f" [{low}–{high}]" if low != high else "") + (f" n={len(self.values)}" if count else "")
        return f"{told}, {beside}" if beside else told


@dataclass(frozen=True)
class Row:
    """One metric at one point of the factors: a `Median` for each arm that was measured there."""

    metric: str
    at: Mapping[str, Level]
    by_arm: Mapping[str, Median]

    @property
    def unit(self) -> str | None:
        """The unit that all arms share, None where they do not."""
        units = {median.unit for median in self.by_arm.values() if median.values}
        return units.pop() if len(units) == 1 else None

    @property
    def mixed(self) -> bool:
        """Whether the arms were measured under different conditions, so that they cannot be compared."""
        return len({median.conditions for median in self.by_arm.values() if median.values}) > 1


@dataclass(frozen=True)
class Medians:
    """Everything measured: the arms, and a row for each metric and point."""

    arms: tuple[str, ...]
    rows: tuple[Row, ...]


def table(
    workload: Workload, cells: Sequence[Cell], records: Sequence[Record], metrics: Sequence[str] | None = None
) -> Medians:
    """The medians of `metrics`; None: every reported metric, those that the workload declares first."""
    indexed = by_cell(records)
    evidence = {cell.hash: gather(indexed, [cell]) for cell in cells}
    if metrics is None:
        reported = dict.fromkeys(
            name for found in evidence.values() for block in found.blocks for name in block[0].metrics
        )
        declared = [metric.name for metric in workload.metrics if metric.name in reported]
        metrics = list(dict.fromkeys([*declared, *reported]))
    points: dict[str, list[Cell]] = {}
    for cell in cells:
        points.setdefault(canonical(dict(cell.factors)), []).append(cell)
    rows = (
        Row(metric, point[0].factors, {cell.arm: _median(metric, evidence[cell.hash]) for cell in point})
        for metric in metrics
        for point in points.values()
    )
    return Medians(tuple(dict.fromkeys(cell.arm for cell in cells)), tuple(rows))


def terminal(medians: Medians, console: Console) -> None:
    """Print the table; plain text off a terminal."""
    if not medians.rows:
        return
    tables.show(_table(medians, repeat=False), console)
    for note in _notes(medians):
        tables.say(note, console)
    console.file.write("\n")


def markdown(medians: Medians) -> str:
    """The table as Markdown, ending in a newline; "" where nothing was measured."""
    if not medians.rows:
        return ""
    notes = [tables.escaped(note) for note in _notes(medians)]
    return "\n\n".join([tables.markdown(_table(medians, repeat=True)), *notes]) + "\n"


def _median(metric: str, evidence: Evidence) -> Median:
    reported = [block[0].metrics[metric] for block in evidence.blocks if metric in block[0].metrics]
    units = sorted({value.unit for value in reported})
    incomplete: Counter[str] = Counter(record.status for record in evidence.seen if record.status != "ok")
    if len(units) > 1:
        # Numbers of two units have no common median.
        incomplete[f"in {' and in '.join(units)}"] = len(reported)
        return Median((), "", dict(incomplete), evidence.conditions)
    values = tuple(value.value for value in reported)
    return Median(values, units[0] if units else "", dict(incomplete), evidence.conditions)


def _table(medians: Medians, repeat: bool) -> Table:
    """A column for each arm. The commonest n is told once, in the title; a cell tells its own if it
    differs.
    """
    counts = Counter(len(m.values) for row in medians.rows for m in row.by_arm.values() if m.values)
    usual = counts.most_common(1)[0][0] if counts else 0
    rows, last = [], ""
    for row in medians.rows:
        unit, found = row.unit, []
        for arm in medians.arms:
            median = row.by_arm.get(arm)
            found.append("" if median is None else median.text(unit is None, len(median.values) != usual))
        metric = f"{row.metric} ({unit})" if unit and words.unit(unit) else row.metric
        rows.append([metric if repeat or metric != last else "", words.levels(row.at), *found])
        last = metric
    title = f"{TITLE}; n={usual}{'' if len(counts) == 1 else ' where not said otherwise'}"
    return Table(headers=("metric", "at", *medians.arms), rows=rows, title=title)


def _notes(medians: Medians) -> list[str]:
    points = dict.fromkeys(words.levels(row.at) for row in medians.rows if row.mixed)
    return [
        f"{point or 'All arms'}: measured under different conditions, so the arms do not compare."
        for point in points
    ]
