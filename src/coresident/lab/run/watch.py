"""Who is told how a run goes: a terminal, a log, a test. The run itself prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from coresident.lab.records.schema import Block, Record
from coresident.lab.study.cells import Cell
from coresident.lab.study.schema import Study


class Watcher(Protocol):
    """Callbacks, in the order in which they come; none may raise."""

    def planned(self, study: Study, cells: Sequence[Cell], out: Path) -> None: ...
    def started(self, cell: Cell, block: Block, attempt: int) -> None: ...
    def ticked(self, seconds: float, events: Path) -> None: ...
    def ended(self, record: Record) -> None: ...
    def note(self, text: str) -> None: ...
