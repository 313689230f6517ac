"""The course of one pool, from its first process to its last, as the driver leads it."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

from coresident.engines.pool.card.card import reader
from coresident.engines.pool.findings import Findings, Learned
from coresident.engines.pool.job import Job, device_variables, variables
from coresident.engines.pool.processes.card_side import CardSide, card_side, sweep
from coresident.engines.pool.processes.channel import Channel, pair
from coresident.engines.pool.processes.crew import Casualty, Crew, Patience, ending
from coresident.engines.pool.sharing import arena, sharing
from coresident.engines.pool.sharing.device_sharing import DeviceHeld
from coresident.errors import MachineError
from coresident.workload import Reporter

GOLDEN, ZYGOTE = "golden", "zygote"
# What a learner that is started as an interpreter runs.
LEARNER = "coresident.engines.pool.processes.learner_process"
MODULES = {"trl": "coresident.engines.pool.peers.trl"}
# The number of the golden process among the zygote's children, whose others are learners.
GOLDEN_END = -1


def name_of(learner: int) -> str:
    """How a learner is called in messages."""
    return f"learner {learner}"


@dataclass
class Course:
    """One pool run over a base of `size` bytes."""

    job: Job
    cell: Reporter
    size: int
    patience: Patience
    start: float = field(default_factory=time.monotonic)
    ordered: float = 0.0
    card: CardSide | None = None
    golden: Mapping[str, Any] | None = None
    found: Findings = field(init=False)

    def run(self) -> Findings:
        """Lead it. Raises `Casualty` for a member that fails, MemoryError above a budget."""
        file = str(self.job.save())
        self.found = Findings(start=self.start, base_bytes=self.size)
        _allow_descriptors(4 * self.job.parameters.learners + 64)
        with ExitStack() as stack:
            crew = self._crew(stack)
            self.lead(crew, file, stack)
        return self._found()

    def lead(self, crew: Crew, file: str, stack: ExitStack) -> None:
        """From the first member that is started to the last that ends: a process for each learner."""
        numbers = range(self.job.parameters.learners)
        descriptor = self._golden(crew, file, stack) if self.job.from_arena and self.card is None else -1
        solo = self.job.parameters.schedule == "solo"
        forked = solo or self.job.from_arena
        if forked:
            self._zygote(crew, file, descriptor, numbers)
        servants = [name for name in (GOLDEN, ZYGOTE) if name in crew.members]
        assert servants in ([], [ZYGOTE], [GOLDEN, ZYGOTE])
        # The golden process may be the zygote's child, so it leaves first.
        with ending(crew, servants[-1:]), ending(crew, servants[:-1]):
            for group in [[number] for number in numbers] if solo else [list(numbers)]:
                self._start(crew, file, group, forked)
                self._train(crew, group, servants)
            self.end(crew)

    def _found(self) -> Findings:
        if not self.found.learned:
            raise next(iter(self.found.failed.values()))
        return self.found

    def _expect(self, crew: Crew, names: list[str], event: str) -> Mapping[str, Mapping[str, Any]]:
        """What each of `names` says. A learner that fails is taken out of them, where the others are to go on."""
        while True:
            try:
                return crew.expect(names, event)
            except Casualty as casualty:
                self._lose(crew, names, casualty)

    def _lose(self, crew: Crew, names: list[str], casualty: Casualty) -> None:
        if self.job.parameters.on_failure == "stop" or casualty.member not in names:
            raise casualty
        self.found.failed[casualty.member] = casualty
        crew.dismiss(casualty.member)
        names.remove(casualty.member)

    def _crew(self, stack: ExitStack) -> Crew:
        environment = variables(self.job.parameters.threads) | device_variables(self.job)
        if not self.job.on_card:
            return stack.enter_context(Crew(environment, self.patience))
        self.card = stack.enter_context(card_side(self.job, self.size, reader(self.job.device)))
        crew = Crew(environment | self.card.variables, self.patience, self.card.watch.look)
        # Called after every member has ended.
        stack.callback(lambda: sweep(crew.members[GOLDEN].pid if GOLDEN in crew.members else None))
        return stack.enter_context(crew)

    def _golden(self, crew: Crew, file: str, stack: ExitStack) -> int:
        descriptor = arena.create(self.size)
        stack.callback(os.close, descriptor)
        ours, theirs = pair()
        with closing(theirs):
            arguments = [file, str(theirs.fileno()), str(descriptor), str(os.getpid())]
            inherited = (theirs.fileno(), descriptor)
            crew.start(GOLDEN, "coresident.engines.pool.processes.golden", arguments, ours, inherited)
        return descriptor

    def _zygote(self, crew: Crew, file: str, descriptor: int, numbers: Iterable[int]) -> None:
        """Start the zygote while the golden process loads, and wait for both.

        On a card the golden process is the zygote's first child, and learners make their contexts while it loads.
        """
        ours, theirs = pair()
        ends: dict[int, socket.socket] = {}
        channels: dict[int, Channel] = {}
        on_card = self.card is not None and self.job.from_arena
        for number in ([GOLDEN_END] if on_card else []) + list(numbers):
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
        crew.start(ZYGOTE, "coresident.engines.pool.processes.zygote", arguments, ours, inherited)
        for end in (theirs, *ends.values()):
            end.close()
        if readable >= 0:
            os.close(readable)
        for number, channel in channels.items():
            crew.adopt(GOLDEN if number == GOLDEN_END else name_of(number), channel)
        if not on_card:
            self._base(crew)
        with self.cell.phase("zygote"):
            crew.expect([ZYGOTE], "ready")
        if on_card:
            crew.tell([ZYGOTE], "golden", end=GOLDEN_END, member=GOLDEN)

    def _base(self, crew: Crew) -> None:
        """Wait until the golden process has the base, if there is one."""
        if self.golden is not None or GOLDEN not in crew.members:
            return
        with self.cell.phase("golden"):
            self.golden = crew.expect([GOLDEN], "ready")[GOLDEN]
            if self.card is not None:
                self.card.take_handles(crew, GOLDEN, range(self.job.parameters.learners))
        self.found.base_ready = float(self.golden["seconds"])
        self.found.checksums[GOLDEN] = str(self.golden["checksum"])

    def _start(self, crew: Crew, file: str, group: list[int], forked: bool) -> None:
        names = [name_of(number) for number in group]
        start = time.monotonic()
        with self.cell.phase("start"):
            for number in group:
                if forked:
                    crew.tell([ZYGOTE], "fork", end=number, member=name_of(number))
                    continue
                ours, theirs = pair()
                with closing(theirs):
                    arguments = [file, str(number), str(theirs.fileno()), str(os.getpid())]
                    module = MODULES.get(self.job.parameters.sharing, LEARNER)
                    crew.start(name_of(number), module, arguments, ours, (theirs.fileno(),))
            self._expect(crew, names, "alive")
        self.found.fork = max(self.found.fork, time.monotonic() - start)
        self._base(crew)
        ready = start if self.golden is None else float(self.golden["at"])
        self.ordered = max(start, ready)
        if self.card is not None and self.golden is not None:
            for number in group:
                self.card.hand_over(crew, number, name_of(number))

    def _train(self, crew: Crew, group: list[int], servants: list[str]) -> None:
        names = [name for name in map(name_of, group) if name not in self.found.failed]
        with self.cell.phase("load"):
            loaded = self._expect(crew, names, "loaded")
        if self.found.base_ready is None and names:
            self.found.base_ready = float(loaded[names[0]]["seconds"])
        with self.cell.phase("first step"):
            self._expect(crew, names, "barrier")
        now = time.monotonic()
        self.found.first_step = now - self.start
        self.found.learner_start = max(self.found.learner_start, now - self.ordered)
        if self.golden is not None and self.found.golden_to_first_step is None:
            self.found.golden_to_first_step = now - float(self.golden["at"])
        crew.tell(names, "measure")
        memory = self._expect(crew, names, "memory")
        self.note_memory(crew, memory, servants)
        crew.tell(names, "go")
        with self.cell.phase("train"):
            learned = self._expect(crew, names, "learned")
        crew.expect_exit(names)
        for number in (number for number in group if name_of(number) in names):
            values = {key: value for key, value in learned[name_of(number)].items() if key != "event"}
            self.found.learned[number] = Learned(**values)
        self.cell.progress(len(self.found.learned), self.job.parameters.learners, "learners")

    def note_memory(self, crew: Crew, memory: Mapping[str, Mapping[str, Any]], servants: list[str]) -> None:
        """What all that are there hold, at the barrier."""
        # By these the samples that the lab takes of processes get their names.
        named = {name: one.pid for name, one in crew.members.items() if one.pid} | {"driver": os.getpid()}
        self.cell.environment({f"process {name}": pid for name, pid in named.items()})
        if self.card is not None:
            self.card.at_barrier(memory, self.golden)
            self.found.device_held.extend(DeviceHeld(**seen["held"]) for seen in memory.values())
        else:
            self.found.held.extend(
                None if seen["held"] is None else sharing.Held(**seen["held"]) for seen in memory.values()
            )
        self.found.together = max(self.found.together, len(memory) + (GOLDEN in servants))
        sizes = [int(seen["pss"]) for seen in memory.values()]
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

    def end(self, crew: Crew) -> None:
        """The learners are gone: is the golden process's base what it was, and what does the card hold without them?"""
        if self.golden is not None:
            crew.tell([GOLDEN], "check")
            checked = crew.expect([GOLDEN], "checked")[GOLDEN]
            self.found.checksums[f"{GOLDEN} after"] = str(checked["checksum"])
        if self.card is not None:
            self.found.device_use = self.card.use()
            self.found.mps = self.card.mps_control()


def _allow_descriptors(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        if hard not in (resource.RLIM_INFINITY,) and hard < count:
            raise MachineError(
                f"this pool needs {count} open files, and {hard} are allowed", f"raise it: ulimit -n {count}"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
