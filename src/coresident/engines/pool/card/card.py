"""The card as the driver of a pool sees it: the memory in use on all of it, through NVML, with no context of
its own on it.

What each process's allocator counts leaves out contexts and what a copy of a mapping would cost; the whole
card's figure has everything in it, so it decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from coresident.engines.pool import sizes
from coresident.errors import MachineError

# A short peak between two looks stays: torch's allocator keeps what it took.
INTERVAL = 0.02


@dataclass(frozen=True)
class Memory:
    """Bytes of the whole card."""

    total: int
    used: int

    @property
    def free(self) -> int:
        """What a new allocation may get at most."""
        return self.total - self.used


def reader(uuid: str) -> Callable[[], Memory]:
    """A function that reads the memory of the card `uuid`. Raises MachineError where that cannot be done."""
    remedy = "check the driver with nvidia-smi -L, and name a card it lists"
    try:
        import pynvml
    except ImportError:
        raise MachineError(
            "the package nvidia-ml-py is not installed, so a card's memory cannot be read",
            "pip install nvidia-ml-py",
        ) from None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError as error:
        raise MachineError(f"there is no CUDA device {uuid}: {error}", remedy) from None
    version = getattr(pynvml, "nvmlMemory_v2", None)

    def read() -> Memory:
        try:
            # Version 2 keeps apart what the driver reserves for itself.
            told = pynvml.nvmlDeviceGetMemoryInfo(handle, version)
        except pynvml.NVMLError as error:
            raise MachineError(f"the memory of {uuid} cannot be read: {error}", remedy) from None
        return Memory(int(told.total) - int(getattr(told, "reserved", 0)), int(told.used))

    return read


@dataclass
class Watch:
    """Watches the card during one pool. `idle` is what was in use before it, `peak` the highest seen (bytes).

    `look` raises MemoryError as soon as more than `budget` bytes of the whole card are in use.
    """

    read: Callable[[], Memory]
    budget: int | None = None
    interval: float = INTERVAL
    idle: int = 0
    peak: int = 0
    _due: float = field(default=0.0, repr=False)

    def __post_init__(self) -> None:
        self.idle = self.peak = self.read().used

    def used(self) -> int:
        """Bytes in use now. Raises MemoryError above the budget."""
        now = self.read().used
        self.peak = max(self.peak, now)
        if self.budget is not None and now > self.budget:
            raise MemoryError(
                f"the device's memory in use reached {sizes.show(now)}, above the budget device_memory of"
                f" {sizes.show(self.budget)}"
            )
        return now

    def look(self) -> None:
        """`used`, at most once an interval."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self.interval
            self.used()


def require_free(memory: Memory, budget: int | None, needed: int) -> None:
    """Raise MemoryError where the lower bound `needed` (bytes) already does not fit, saying how much is missing."""
    room = memory.free if budget is None else min(memory.free, budget - memory.used)
    if needed > room:
        where = "free on the card" if budget is None or room == memory.free else "left of device_memory"
        raise MemoryError(
            f"the pool needs at least {sizes.show(needed)} of device memory and {sizes.show(max(room, 0))} is"
            f" {where}: {sizes.show(needed - room)} is missing; run fewer learners, share the base"
            " (sharing: fork) or take a smaller one"
        )
