"""The course of a pool that is one process: the arm `packed`, as the driver leads it."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, closing

from coresident.engines.pool.findings import Learned
from coresident.engines.pool.processes.channel import pair
from coresident.engines.pool.processes.course import Course
from coresident.engines.pool.processes.crew import Casualty, Crew

PACK = "pack"
MODULE = "coresident.engines.pool.processes.pack_process"


class PackCourse(Course):
    """A course whose learners are one process."""

    def lead(self, crew: Crew, file: str, stack: ExitStack) -> None:  # noqa: ARG002 - it holds nothing open
        """Start the pack and hear it to its end. Raises `Casualty` for the pack, or for the learner that ended it."""
        phase = self.cell.phase
        start = time.monotonic()
        with phase("start"):
            ours, theirs = pair()
            with closing(theirs):
                arguments = [file, str(theirs.fileno()), str(os.getpid())]
                crew.start(PACK, MODULE, arguments, ours, (theirs.fileno(),))
            crew.expect([PACK], "alive")
        with phase("load"):
            self.found.base_ready = float(crew.expect([PACK], "loaded")[PACK]["seconds"])
        with phase("first step"):
            crew.expect([PACK], "barrier")
        now = time.monotonic()
        self.found.first_step, self.found.learner_start = now - self.start, now - start
        crew.tell([PACK], "measure")
        self.note_memory(crew, crew.expect([PACK], "memory"), [])
        crew.tell([PACK], "go")
        with phase("train"):
            for _ in range(self.job.parameters.learners):
                self._note(crew)
            crew.expect([PACK], "learned")
        crew.expect_exit([PACK])
        self.cell.progress(len(self.found.learned), self.job.parameters.learners, "learners")
        self.end(crew)

    def _note(self, crew: Crew) -> None:
        """What became of one learner."""
        told = dict(crew.expect([PACK], "result")[PACK])
        del told["event"]
        number = int(told.pop("learner"))
        if "reason" in told:
            member = f"learner {number}"
            self.found.failed[member] = Casualty(member, str(told["status"]), str(told["reason"]))
        else:
            self.found.learned[number] = Learned(**told)
