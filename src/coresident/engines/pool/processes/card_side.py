"""The driver's side of a pool on a card: what is watched while it runs, what each process is told of the base,
and what is read back of both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coresident.engines.pool.card import mps
from coresident.engines.pool.card.card import Memory, Watch, require_free
from coresident.engines.pool.card.device_rules import device_processes
from coresident.engines.pool.job import Job
from coresident.engines.pool.processes.crew import Crew
from coresident.engines.pool.sharing.device_sharing import DeviceUse
from coresident.engines.pool.sharing.sharing import Decision
from coresident.engines.pool.sizes import parse
from coresident.errors import MachineError

# A context alone, rounded down, since needs are a lower bound.
LEAST_CONTEXT = 200 << 20
# How long memory of processes that ended may take to be free again: under MPS another process frees it.
SETTLING = 2.0
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - torch's own place


@dataclass
class CardSide:
    """One pool's. `clients` are the service's, by its own list at the barrier (None: not read); `flags` say of each
    process whether the driver calls it a client.
    """

    job: Job
    watch: Watch
    service: mps.Service | None = None
    handles: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    flags: dict[str, bool | None] = field(default_factory=dict)
    clients: int | None = None
    expected: int = 0
    _barrier: tuple[int, int] = (0, 1)

    @property
    def variables(self) -> dict[str, str]:
        """What the environment of every process has for the service, or against any other."""
        return mps.WITHOUT if self.service is None else self.service.variables

    def take_handles(self, crew: Crew, golden: str, learners: Iterable[int]) -> None:
        """Hear a handle of the base for each learner."""
        for _ in learners:
            told = dict(crew.expect([golden], "handle")[golden])
            self.handles[int(told.pop("learner"))] = told

    def hand_over(self, crew: Crew, learner: int, name: str) -> None:
        """Give a learner its handle, which is good for it alone."""
        told = self.handles.pop(learner)
        crew.tell([name], "base", **{key: value for key, value in told.items() if key != "event"})

    def at_barrier(self, memory: Mapping[str, Mapping[str, Any]], golden: Mapping[str, Any] | None) -> None:
        """Note what is in use, and who is a client, while all of a group wait."""
        used = self.watch.used()
        if used > self._barrier[0]:
            self._barrier = (used, len(memory))
        self.flags |= {name: seen["mps"] for name, seen in memory.items()}
        self.expected = max(self.expected, len(memory) + (golden is not None))
        if golden is not None:
            self.flags["golden"] = golden["mps"]
        if self.service is not None:
            with suppress(MachineError):
                self.clients = max(self.clients or 0, sum(map(len, self.service.clients().values())))

    def use(self) -> DeviceUse:
        """The whole card's figures; called when the learners are gone and the golden process is still there."""
        barrier, learners = self._barrier
        return DeviceUse(self.watch.idle, barrier, settled(self.watch.read), self.watch.peak, learners)

    def mps_control(self) -> tuple[dict[str, Any], Decision]:
        """What ran, and whether that is what `mps` asked for."""
        ran = {"clients": self.clients, "expected": self.expected, "processes": self.flags}
        return ran, decide_mps(self.job.parameters.mps, self.flags, self.clients, self.expected)


@contextmanager
def card_side(job: Job, size: int, read: Callable[[], Memory]) -> Iterator[CardSide]:
    """The card's side of a pool over a base of `size` bytes: memory checked, service started, and all of it undone.

    `read` tells the card's memory.
    """
    settings = job.parameters
    budget = None if settings.device_memory is None else parse(settings.device_memory)
    together = settings.at_once
    bases = {"private": together, "arena-copy": together + 1}.get(job.hold, 1)
    require_free(read(), budget, bases * size + device_processes(settings) * LEAST_CONTEXT)
    with ExitStack() as stack:
        watch = Watch(read, budget)
        service = stack.enter_context(mps.service(job.device)) if settings.mps == "on" else None
        yield CardSide(job, watch, service)


def settled(read: Callable[[], Memory]) -> int:
    """Bytes in use, once they no longer fall."""
    deadline = time.monotonic() + SETTLING
    used = read().used
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = read().used
        if now >= used:
            return now
        used = now
    return used


def sweep(pid: int | None, where: Path = SHARED_MEMORY) -> None:
    """Remove the counters of handles that a producer left behind: it ends without taking itself apart."""
    for file in where.glob(f"torch_{pid}_*") if pid is not None else ():
        with suppress(OSError):
            file.unlink()


def decide_mps(asked: str, flags: Mapping[str, bool | None], clients: int | None, expected: int) -> Decision:
    """Whether every process ran with (`on`) or without (`off`) the service; None where nothing told."""
    wrong = sorted(name for name, seen in flags.items() if seen is (asked == "off"))
    if wrong:
        return Decision(False, f"{wrong[0]} ran {'under' if asked == 'off' else 'without'} MPS")
    if asked == "on" and clients is not None and clients < expected:
        return Decision(False, f"MPS had {clients} clients where {expected} processes were to be")
    unknown = not flags or any(seen is None for seen in flags.values())
    if unknown and (asked == "off" or clients is None):
        return Decision(None, "the driver does not say whether a process runs under MPS")
    return Decision(True, "")
