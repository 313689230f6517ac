"""The course of a pool that is one process: the arm `packed`, as the driver leads it."""

from __future__ import annotations

import os
import time
from contextlib import closing
from typing import TYPE_CHECKING

from coresident.engines.pool.findings import Learned
from coresident.engines.pool.processes.channel import pair
from coresident.engines.pool.processes.crew import Casualty, Crew

if TYPE_CHECKING:
    from coresident.engines.pool.processes.course import Course

PACK = "pack"
MODULE = "coresident.engines.pool.processes.pack_process"


def lead(course: Course, crew: Crew, file: str) -> None:
    """Start the pack and hear it to its end. Raises `Casualty` for the pack, or for the learner that ended it."""
    found, phase = course.found, course.cell.phase
    start = time.monotonic()
    with phase("start"):
        ours, theirs = pair()
        with closing(theirs):
            arguments = [file, str(theirs.fileno()), str(os.getpid())]
            crew.start(PACK, MODULE, arguments, ours, (theirs.fileno(),))
        crew.expect([PACK], "alive")
    with phase("load"):
        found.base_ready = float(crew.expect([PACK], "loaded")[PACK]["seconds"])
    with phase("first step"):
        crew.expect([PACK], "barrier")
    now = time.monotonic()
    found.first_step, found.learner_start = now - course.start, now - start
    crew.tell([PACK], "measure")
    course.note_memory(crew, crew.expect([PACK], "memory"), [])
    crew.tell([PACK], "go")
    with phase("train"):
        for _ in range(course.job.parameters.learners):
            _note(course, crew)
        crew.expect([PACK], "learned")
    crew.expect_exit([PACK])
    course.cell.progress(len(found.learned), course.job.parameters.learners, "learners")


def _note(course: Course, crew: Crew) -> None:
    """What became of one learner."""
    told = dict(crew.expect([PACK], "result")[PACK])
    del told["event"]
    number = int(told.pop("learner"))
    if "reason" in told:
        member = f"learner {number}"
        course.found.failed[member] = Casualty(member, str(told["status"]), str(told["reason"]))
    else:
        course.found.learned[number] = Learned(**told)
