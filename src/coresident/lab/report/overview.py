"""What a run directory holds, for a person: every cell with its outcomes, numbers and controls; one cell in full."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from coresident.errors import UserError, nearest
from coresident.lab.records import generations
from coresident.lab.records.schema import MetricValue, Record
from coresident.lab.records.store import Stored
from coresident.lab.report import tables
from coresident.lab.study.cells import Cell
from coresident.lab.verdict import words

SHOWN_VALUES = 6
SHOWN_METRICS = 3


def rows(stored: Sequence[Stored]) -> list[dict[str, Any]]:
    """One row a cell: outcomes counted, failed and unverified controls, retracted records, the last reason."""
    cells: dict[str, list[Stored]] = {}
    for one in stored:
        cells.setdefault(one.record.cell.id, []).append(one)
    table = []
    for cell, members in sorted(cells.items()):
        active = [one.record for one in members if one.retraction is None]
        controls = Counter(
            (name, control.state)
            for record in active
            for name, control in record.controls.items()
            if control.state != "passed"
        )
        table.append(
            {
                "cell": cell,
                "arm": members[0].record.cell.arm,
                "factors": members[0].record.cell.factors,
                "outcomes": dict(Counter(record.status for record in active)),
                "controls": {f"{name} {state}": count for (name, state), count in controls.items()},
                "retracted": len(members) - len(active),
                "conditions": len({record.conditions.hash for record in active}),
                "reasons": _reasons(active),
                "last_reason": next((record.reason for record in reversed(active) if record.reason), ""),
            }
        )
    return table


def _reasons(records: Sequence[Record]) -> list[str]:
    """The newest reasons, each once, three at most."""
    return list(dict.fromkeys(record.reason for record in reversed(records) if record.reason))[:3]


def status(stored: Sequence[Stored], console: Console) -> None:
    """Print the rows, and below them what a reader must know before believing a number."""
    table = Table(box=None, pad_edge=False)
    for column in ("cell", "outcomes", "controls not passed", "retracted"):
        table.add_column(column, overflow="fold")
    found = rows(stored)
    for row in found:
        outcomes = ", ".join(f"{count} {name}" for name, count in row["outcomes"].items())
        controls = ", ".join(f"{name} x{count}" for name, count in row["controls"].items())
        table.add_row(row["cell"], outcomes, controls or "-", str(row["retracted"] or "-"))
    console.print(table)
    for row in found:
        for reason in row["reasons"]:
            console.print(f"{row['cell']}: {reason}", markup=False, highlight=False, soft_wrap=True)
    _unpooled(stored, console)


def _unpooled(stored: Sequence[Stored], console: Console) -> None:
    conditions = {one.record.conditions.hash for one in stored}
    if len(conditions) > 1:
        console.print(f"records under {len(conditions)} different conditions; they are never pooled")


def cells(stored: Sequence[Stored], console: Console, run: Path, claimed: Iterable[str] = ()) -> None:
    """Print a line a cell: its outcomes and the medians of a few metrics, those `claimed` if there are any."""
    found = rows(stored)
    active: dict[str, list[Record]] = {row["cell"]: [] for row in found}
    for one in stored:
        if one.retraction is None:
            active[one.record.cell.id].append(one.record)
    counted = {cell: _counted(records) for cell, records in active.items()}
    reported = dict.fromkeys(name for cell in counted.values() for one in cell for name in one.metrics)
    metrics = [name for name in dict.fromkeys(claimed) if name in reported] or list(reported)
    columns = [_column(name, counted) for name in metrics[:SHOWN_METRICS]]
    told = [
        (row["cell"], ", ".join(f"{count} {name}" for name, count in _outcomes(row).items())) for row in found
    ]
    # As many metrics as leave a cell its one line.
    forms = [
        tables.Table(
            ("cell", "records", *(header for header, _ in columns[:most])),
            [(*row, *(values[row[0]] for _, values in columns[:most])) for row in told],
            "Cells, with medians over blocks" if columns[:most] else "Cells",
            right=frozenset(range(2, 2 + most)),
        )
        for most in range(len(columns), -1, -1)
    ]
    tables.show(forms[0], console, *forms[1:])
    _unpooled(stored, console)
    _print(console, f"a cell's records in full: coresident show {shlex.quote(str(run))} CELL")


def _outcomes(row: dict[str, Any]) -> dict[str, int]:
    return {**row["outcomes"], **({"retracted": row["retracted"]} if row["retracted"] else {})}


def _counted(active: Sequence[Record]) -> list[Record]:
    """Which of one cell's records count: one a repetition, all under the newest conditions."""
    if not active:
        return []
    newest = max(active, key=lambda one: one.started).cell
    return [block[0] for block in generations.counting(active, Cell(**dict(newest)))]


def _column(metric: str, counted: dict[str, list[Record]]) -> tuple[str, dict[str, str]]:
    """A metric's header and its median for each cell; a unit that all share stands in the header."""
    values = {
        cell: [one.metrics[metric] for one in records if metric in one.metrics]
        for cell, records in counted.items()
    }
    units = {value.unit for found in values.values() for value in found}
    shared = words.unit(units.pop()) if len(units) == 1 else ""
    told = {cell: _median(found, bool(units)) for cell, found in values.items()}
    return f"{metric} ({shared})" if shared else metric, told


def _median(values: Sequence[MetricValue], unit: bool) -> str:
    units = sorted({value.unit for value in values})
    if len(units) > 1:
        # Numbers of two units have no common median.
        return f"in {' and in '.join(units)}"
    if not values:
        return ""
    told = words.number(statistics.median(value.value for value in values))
    return f"{told} {words.unit(units[0])}".rstrip() if unit else told


def of_cell(stored: Sequence[Stored], cell: str) -> list[Stored]:
    """A cell's records by its id, the start of it, or its arm's name if that is enough; refuses what fits nothing."""
    exact = [one for one in stored if one.record.cell.id == cell]
    found = exact or [one for one in stored if one.record.cell.id.startswith(cell)]
    if not found:
        known = {one.record.cell.id for one in stored}
        raise UserError(f"no cell {cell!r} in this run", nearest(cell, known))
    several = sorted({one.record.cell.id for one in found})
    if len(several) > 1:
        raise UserError(f"{cell!r} fits several cells", f"name one of {', '.join(several)}")
    return found


def show(stored: Sequence[Stored], console: Console) -> None:
    """Print records in full, for reading."""
    for one in stored:
        record = one.record
        console.rule(record.id)
        if one.retraction is not None:
            _print(console, f"RETRACTED {one.retraction.date}: {one.retraction.reason}")
        _print(console, f"status      {record.status} {record.reason}".rstrip())
        _print(
            console,
            f"block       {record.block.repetition + 1}, generation {record.block.generation}, "
            f"place {record.block.position + 1} of {len(record.block.members)}, started {record.started}",
        )
        _print(console, f"conditions  {record.conditions.hash[:12]}")
        for name, metric in record.metrics.items():
            samples = f"  ({len(metric.samples)} samples)" if metric.samples else ""
            value = f"{metric.value:.6g} {words.unit(metric.unit)}".rstrip()
            _print(console, f"metric      {name} = {value}{samples}")
        for name, control in record.controls.items():
            why = f" ({control.reason})" if control.reason else ""
            took = f"asked {words.plain(control.asked)}, ran {words.plain(control.ran)}"
            _print(console, f"control     {name}: {control.state}{why}; {took}")
        for name, series in record.series.items():
            head = ", ".join(
                "-" if value is None else f"{value:.6g}" for value in series.values[:SHOWN_VALUES]
            )
            more = ", ..." if series.length > SHOWN_VALUES else ""
            _print(console, f"series      {name} [{series.length}] {head}{more}")
        for name, digest in record.digests.items():
            _print(console, f"digest      {name} {digest[:16]}")


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
