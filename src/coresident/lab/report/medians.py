"""What was measured, beside what is claimed of it: medians of metrics by factor levels and arm, without judgement."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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

TITLE = "Measured: median [lowest–highest] over blocks; shown, not judged"


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

    @property
    def beside(self) -> str:
        """ "1 oom, 2 failed"; "" where every attempt counts."""
        return ", ".join(f"{number} {status}" for status, number in self.incomplete.items())

    def text(self, unit: bool = False, count: bool = True) -> str:
        """ "812 [798–824] n=3", or what there is instead; the unit and n only if asked for."""
        if not self.values:
            return self.beside or "-"
        low, high = words.number(min(self.values)), words.number(max(self.values))
        told = words.number(statistics.median(self.values))
        told = f"{told} {words.unit(self.unit)}".rstrip() if unit else told
        told += f" [{low}–{high}]" if low != high else ""
        return f"{told} n={len(self.values)}" if count else told


@dataclass(frozen=True)
class Row:
    """One metric at one point of the factors: a `Median` for each arm that was measured there."""

    metric: str
    at: Mapping[str, Level]
    by_arm: Mapping[str, Median]

    @property
    def mixed(self) -> bool:
        """Whether the arms were measured under different conditions, so that they cannot be compared."""
        return len({median.conditions for median in self.by_arm.values() if median.values}) > 1


@dataclass(frozen=True)
class Medians:
    """What is shown of what was measured: the arms, and a row for each metric and point.

    `others` counts the metrics that were measured and are not shown.
    """

    arms: tuple[str, ...]
    rows: tuple[Row, ...]
    others: int = 0


def table(
    workload: Workload, cells: Sequence[Cell], records: Sequence[Record], claimed: Collection[str] = ()
) -> Medians:
    """The medians of the `claimed` metrics, or of every reported one where none of them was reported; those that the
    workload declares come first.
    """
    indexed = by_cell(records)
    evidence = {cell.hash: gather(indexed, [cell]) for cell in cells}
    reported = dict.fromkeys(
        name for found in evidence.values() for block in found.blocks for name in block[0].metrics
    )
    declared = [metric.name for metric in workload.metrics if metric.name in reported]
    every = list(dict.fromkeys([*declared, *reported]))
    metrics = [name for name in every if name in claimed] or every
    points: dict[str, list[Cell]] = {}
    for cell in cells:
        points.setdefault(canonical(dict(cell.factors)), []).append(cell)
    rows = (
        Row(metric, point[0].factors, {cell.arm: _median(metric, evidence[cell.hash]) for cell in point})
        for metric in metrics
        for point in points.values()
    )
    arms = tuple(dict.fromkeys(cell.arm for cell in cells))
    return Medians(arms, tuple(rows), len(every) - len(metrics))


def terminal(medians: Medians, console: Console, run: Path) -> None:
    """Print the table of `run`; plain text off a terminal."""
    if not medians.rows:
        return
    tables.show(_by_point(medians, repeat=False), console, _by_arm(medians))
    for note in _notes(medians, run):
        tables.say(note, console)
    console.file.write("\n")


def markdown(medians: Medians, run: Path) -> str:
    """The table as Markdown, ending in a newline; "" where nothing was measured."""
    if not medians.rows:
        return ""
    notes = [tables.escaped(note) for note in _notes(medians, run)]
    return "\n\n".join([tables.markdown(_by_point(medians, repeat=True)), *notes]) + "\n"


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


def _by_point(medians: Medians, repeat: bool) -> Table:
    """A row for each metric and point, a column for each arm."""
    title, found = _told(medians)
    rows = [
        [metric if repeat or not number else "", point, *told]
        for metric, points in found
        for number, (point, told) in enumerate(points)
    ]
    return Table(("metric", "at", *medians.arms), rows, title)


def _by_arm(medians: Medians) -> Table:
    """A row for each metric and arm, a column for each point."""
    title, found = _told(medians)
    rows = [
        ["" if number else metric, arm, *(told[number] for _, told in points)]
        for metric, points in found
        for number, arm in enumerate(medians.arms)
    ]
    return Table(("metric", "arm", *(point for point, _ in found[0][1])), rows, title)


def _told(medians: Medians) -> tuple[str, list[tuple[str, list[tuple[str, list[str]]]]]]:
    """The title; and of each metric, at each point, what is said of each arm, "" where it has no cell there.

    A unit that all of a metric share is told with its name, the commonest n in the title; a cell tells its own
    where it differs.
    """
    counts = Counter(len(m.values) for row in medians.rows for m in row.by_arm.values() if m.values)
    usual = counts.most_common(1)[0][0] if counts else 0
    by_metric: dict[str, list[Row]] = {}
    for row in medians.rows:
        by_metric.setdefault(row.metric, []).append(row)
    found = []
    for metric, rows in by_metric.items():
        units = {median.unit for row in rows for median in row.by_arm.values() if median.values}
        several = len(units) > 1
        shared = "" if several else "".join(map(words.unit, units))
        points = []
        for row in rows:
            cells = [row.by_arm.get(arm) for arm in medians.arms]
            told = ["" if cell is None else cell.text(several, len(cell.values) != usual) for cell in cells]
            points.append((words.levels(row.at), told))
        found.append((f"{metric} ({shared})" if shared else metric, points))
    if not counts:
        return TITLE, found
    return f"{TITLE}; n={usual}{'' if len(counts) == 1 else ' where not said otherwise'}", found


def _notes(medians: Medians, run: Path) -> list[str]:
    points = dict.fromkeys(words.levels(row.at) for row in medians.rows if row.mixed)
    notes = [
        f"{point or 'All arms'}: measured under different conditions, so the arms do not compare."
        for point in points
    ]
    beside = {
        f"{arm}{' at ' if row.at else ''}{words.levels(row.at)}, {median.beside}": None
        for row in medians.rows
        for arm, median in row.by_arm.items()
        if median.values and median.incomplete
    }
    if beside:
        notes.append(f"Not counted: {'; '.join(beside)}.")
    if medians.others:
        more = words.count(medians.others, "more metric")
        notes.append(f"{more}: coresident verdict {shlex.quote(str(run))} --all")
    return notes
