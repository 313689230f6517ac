"""How a run is seen while it goes: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.status import Status

from coresident.lab.records.schema import Block, Record
from coresident.lab.study.cells import Cell
from coresident.lab.study.schema import Study


class Progress:
    """A watcher that writes to `console`: a line a finished cell, and, on a terminal, what runs now beneath them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Status | None = None
        self._now = ""
        self._shown = -1.0

    def planned(self, study: Study, cells: Sequence[Cell], out: Path) -> None:
        """The whole job, in two lines."""
        limit = study.repetitions
        blocks = f"{limit.min}" if limit.limit == limit.min else f"{limit.min} to {limit.limit}"
        self._line(f"{study.study}: {study.question}")
        self._line(f"{len(cells)} cells, {blocks} blocks, records in {out}/records")

    def started(self, cell: Cell, block: Block, attempt: int) -> None:
        """A cell starts."""
        again = f", attempt {attempt}" if attempt > 1 else ""
        self._now = f"block {block.repetition + 1} {_name(cell.arm, cell.factors)}{again}"
        self._shown = -1.0
        if self._console.is_terminal:
            self._live = self._console.status(self._now)
            self._live.start()

    def ticked(self, seconds: float, events: Path) -> None:
        """A cell goes on: at most once a second."""
        if self._live is None or seconds - self._shown < 1.0:
            return
        self._shown = seconds
        self._live.update(f"{self._now}  {seconds:.0f} s {_last_progress(events)}".rstrip())

    def ended(self, record: Record) -> None:
        """A cell is recorded."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        why = f" ({record.reason})" if record.reason else ""
        name = _name(record.cell.arm, record.cell.factors)
        self._line(
            f"block {record.block.repetition + 1}  {name}: {record.status}{why}, {record.duration:.1f} s"
        )

    def note(self, text: str) -> None:
        """Something worth a line."""
        self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _name(arm: str, factors: object) -> str:
    levels = " ".join(f"{name}={level}" for name, level in dict(factors).items())  # type: ignore[call-overload]
    return f"{arm} {levels}".strip()


def _last_progress(events: Path) -> str:
    """The newest progress event of any of the cell's processes, from the tails of their files."""
    newest: tuple[float, str] = (-1.0, "")
    for path in events.glob("*.jsonl"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().splitlines()
        for line in reversed(lines):
            if b'"progress"' not in line:
                continue
            try:
                event = json.loads(line)
                newest = max(
                    newest,
                    (float(event.get("t", 0)), f"{event['done']:g}/{event['total']:g} {event['unit']}"),
                )
            except (ValueError, KeyError, TypeError):
                continue
            break
    return newest[1].strip()
