"""The driver of one pool: starts its processes, brings all learners to the barrier, measures them there, and
reports.

It holds no base and imports no torch: what it adds to the pool's memory is an interpreter.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, NoReturn

from coresident.engines.pool import arena, sharing
from coresident.engines.pool.base import ensure
from coresident.engines.pool.channel import Channel, pair
from coresident.engines.pool.crew import Casualty, Crew, Patience, ending
from coresident.engines.pool.findings import Findings, Learned, report
from coresident.engines.pool.job import HOLDS, Hold, Job, variables
from coresident.engines.pool.loading import check_mappable
from coresident.engines.pool.parameters import DPO
from coresident.errors import MachineError
from coresident.workload import Reporter

GOLDEN, ZYGOTE = "golden", "zygote"
PATIENCE = Patience()


def run(parameters: DPO, cell: Reporter) -> None:
    """Train the pool and report it. Raises `MemoryError`, `FloatingPointError` or `MachineError` naming what
    failed.
    """
    drive(parameters, cell)


def drive(
    parameters: DPO, cell: Reporter, hold: Hold | None = None, patience: Patience = PATIENCE
) -> Findings:
    """`run`, with the seams that a test needs: `hold` is how learners hold the base whatever
    `parameters.sharing` asks.
    """
    hold = HOLDS[parameters.sharing] if hold is None else hold
    with cell.phase("base"):
        directory = ensure(parameters.base, parameters.dtype)
        if hold == "mapped":
            check_mappable(directory, parameters.dtype)
    cell.work.mkdir(parents=True, exist_ok=True)
    job = Job(
        parameters=parameters,
        hold=hold,
        base=str(directory.path),
        events=str(cell.events),
        work=str(cell.work),
        cpus=[list(cores) for cores in cell.cpus],
    )
    size = directory.bytes(parameters.dtype)
    try:
        findings = _Pool(job, cell, size, patience).run()
    except Casualty as casualty:
        _end_with(casualty)
    report(parameters, findings, cell)
    return findings


def _end_with(casualty: Casualty) -> NoReturn:
    said = str(casualty)
    if casualty.status == "oom":
        raise MemoryError(said) from None
    if casualty.status == "nonfinite":
        raise FloatingPointError(said) from None
    raise MachineError(said, "see the cell's log for what that process wrote last") from None


def name_of(learner: int) -> str:
    """How a learner is called in messages."""
    return f"learner {learner}"


@dataclass
class _Pool:
    """One pool run, from the first process to the last."""

    job: Job
    cell: Reporter
    size: int
    patience: Patience
    start: float = field(default_factory=time.monotonic)
    ordered: float = 0.0
    found: Findings = field(init=False)

    def run(self) -> Findings:
        file = str(self.job.save())
        self.found = Findings(start=self.start, base_bytes=self.size)
        numbers = range(self.job.parameters.learners)
        _allow_descriptors(4 * len(numbers) + 64)
        with ExitStack() as stack:
            crew = stack.enter_context(Crew(variables(self.job.parameters.threads), self.patience))
            descriptor = self._golden(crew, file, stack) if self.job.hold == "arena" else -1
            solo = self.job.parameters.schedule == "solo"
            forked = solo or descriptor >= 0
            if forked:
                self._zygote(crew, file, descriptor, numbers)
            servants = [name for name in (GOLDEN, ZYGOTE) if name in crew.members]
            with ending(crew, servants):
                for group in [[number] for number in numbers] if solo else [list(numbers)]:
                    self._start(crew, file, group, forked)
                    self._train(crew, group, servants)
                if descriptor >= 0:
                    crew.tell([GOLDEN], "check")
                    self.found.checksums[f"{GOLDEN} after"] = crew.expect([GOLDEN], "checked")[GOLDEN][
                        "checksum"
                    ]
        return self.found

    def _golden(self, crew: Crew, file: str, stack: ExitStack) -> int:
        descriptor = arena.create(self.size)
        stack.callback(os.close, descriptor)
        ours, theirs = pair()
        with closing(theirs):
            arguments = [file, str(theirs.fileno()), str(descriptor), str(os.getpid())]
            crew.start(
                GOLDEN, "coresident.engines.pool.golden", arguments, ours, (theirs.fileno(), descriptor)
            )
        return descriptor

    def _zygote(self, crew: Crew, file: str, descriptor: int, numbers: Iterable[int]) -> None:
        """Start the zygote while the golden process loads; wait for both."""
        ours, theirs = pair()
        ends: dict[int, socket.socket] = {}
        channels: dict[int, Channel] = {}
        for number in numbers:
            channels[number], ends[number] = pair()
        # A learner that could write through its descriptor would not fault.
        readable = arena.reading(descriptor) if descriptor >= 0 else -1
        inherited = [
            theirs.fileno(),
            *(end.fileno() for end in ends.values()),
            *([readable] if readable >= 0 else []),
        ]
        arguments = [file, str(theirs.fileno()), str(readable), str(os.getpid())]
        arguments += [f"{number}:{end.fileno()}" for number, end in ends.items()]
        crew.start(ZYGOTE, "coresident.engines.pool.zygote", arguments, ours, inherited)
        for end in (theirs, *ends.values()):
            end.close()
        if readable >= 0:
            os.close(readable)
        for number, channel in channels.items():
            crew.adopt(name_of(number), channel)
        if GOLDEN in crew.members:
            with self.cell.phase("golden"):
                ready = crew.expect([GOLDEN], "ready")[GOLDEN]
            self.found.base_ready = float(ready["seconds"])
            self.found.checksums[GOLDEN] = str(ready["checksum"])
        with self.cell.phase("zygote"):
            crew.expect([ZYGOTE], "ready")

    def _start(self, crew: Crew, file: str, group: list[int], forked: bool) -> None:
        names = [name_of(number) for number in group]
        start = self.ordered = time.monotonic()
        with self.cell.phase("start"):
            for number in group:
                if forked:
                    crew.tell([ZYGOTE], "fork", learner=number, member=name_of(number))
                    continue
                ours, theirs = pair()
                with closing(theirs):
                    arguments = [file, str(number), str(theirs.fileno()), str(os.getpid())]
                    module = "coresident.engines.pool.learner_process"
                    crew.start(name_of(number), module, arguments, ours, (theirs.fileno(),))
            crew.expect(names, "alive")
        self.found.fork = max(self.found.fork, time.monotonic() - start)

    def _train(self, crew: Crew, group: list[int], servants: list[str]) -> None:
        names = [name_of(number) for number in group]
        with self.cell.phase("load"):
            loaded = crew.expect(names, "loaded")
        if self.found.base_ready is None:
            self.found.base_ready = float(loaded[names[0]]["seconds"])
        with self.cell.phase("first step"):
            crew.expect(names, "barrier")
        self.found.first_step = time.monotonic() - self.start
        self.found.learner_start = max(self.found.learner_start, time.monotonic() - self.ordered)
        crew.tell(names, "measure")
        memory = crew.expect(names, "memory")
        self._note_memory(crew, [dict(memory[name]) for name in names], servants)
        crew.tell(names, "go")
        with self.cell.phase("train"):
            learned = crew.expect(names, "learned")
        crew.expect_exit(names)
        for number in group:
            values = {key: value for key, value in learned[name_of(number)].items() if key != "event"}
            self.found.learned[number] = Learned(**values)
        self.cell.progress(len(self.found.learned), self.job.parameters.learners, "learners")

    def _note_memory(self, crew: Crew, memory: list[dict[str, Any]], servants: list[str]) -> None:
        held = [None if seen["held"] is None else sharing.Held(**seen["held"]) for seen in memory]
        self.found.held.extend(held)
        self.found.together = max(self.found.together, len(memory) + (GOLDEN in servants))
        sizes = [int(seen["pss"]) for seen in memory]
        try:
            others = sum(sharing.pss(crew.members[name].pid or 0) for name in servants)
        except OSError:
            others = -1
        if not all(sizes) or others < 0:
            self.found.memory_unread = True
            return
        learners = sum(sizes)
        # Solo learners are never there together: what the pool needs is what the largest needs.
        self.found.learner_bytes = max(self.found.learner_bytes, learners)
        self.found.pool_bytes = max(self.found.pool_bytes, learners + others)


def _allow_descriptors(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        if hard not in (resource.RLIM_INFINITY,) and hard < count:
            raise MachineError(
                f"this pool needs {count} open files, and {hard} are allowed", f"raise it: ulimit -n {count}"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
