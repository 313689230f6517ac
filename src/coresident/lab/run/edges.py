"""Where a run touches the world beyond the cells' own processes, in one object, so that a test can stand in for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from coresident.lab.records.files import Disk
from coresident.lab.run.machine.nvml import Nvml
from coresident.lab.run.preflight import PATIENCE


@dataclass(frozen=True)
class Edges:
    """The disk that results go to; `wall`, the clock that says when (and never how long: it may be set); the cards' driver
    (None: the machine's own); `patience`, the seconds that a card's memory is given to come back.
    """

    disk: Disk = field(default_factory=Disk)
    wall: Callable[[], float] = time.time
    nvml: Nvml | None = None
    patience: float = PATIENCE
