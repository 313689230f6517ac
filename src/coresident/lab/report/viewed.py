"""Shows an engine's view of a run's records; which engine it is, nothing here knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coresident.errors import UserError
from coresident.lab.records.store import Stored
from coresident.lab.report import tables
from coresident.views import Seen, View

if TYPE_CHECKING:
    from rich.console import Console


def data(view: View, run: Path, stored: Sequence[Stored]) -> list[dict[str, Any]]:
    """What the view makes of the records. Raises `UserError` where it cannot read any of them."""
    mine = [one for one in stored if one.record.cell.workload in view.workloads]
    if not mine:
        others = sorted({one.record.cell.workload for one in stored})
        held = f"its records are of {', '.join(others)}" if others else "it has none"
        raise UserError(
            f"view {view.name!r} shows records of {', '.join(sorted(view.workloads))}, and {held}",
            f"leave --view out, or name a run of {' or '.join(sorted(view.workloads))}",
        )
    return view.data([_seen(run, one) for one in mine])


def terminal(view: View, rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the view's tables; plain text off a terminal."""
    for shown in view.tables(rows):
        tables.show(tables.Table(shown.headers, shown.rows, shown.title, shown.numbers), console)
        console.file.write("\n")


def _seen(run: Path, stored: Stored) -> Seen:
    record = stored.record
    place = run / "cells" / record.cell.id / f"r{record.block.repetition}" / f"a{record.attempt}"
    return Seen(
        id=record.id,
        record=record.model_dump(),
        retracted=stored.retraction is not None,
        place=place if place.is_dir() else None,
    )
