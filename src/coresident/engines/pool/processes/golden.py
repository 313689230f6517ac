"""The golden process: fills the arena with the base, seals it, keeps it mapped, and outlives every learner.

`python -m coresident.engines.pool.processes.golden JOB CHANNEL ARENA PARENT`

It needs no torch unless it has to convert, so that what it adds to the pool's memory is an interpreter. On a
card its work is `golden_device`'s.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from coresident.engines.pool.base import checksum
from coresident.engines.pool.base.base import read
from coresident.engines.pool.job import Job
from coresident.engines.pool.processes.channel import Channel, Closed
from coresident.engines.pool.processes.failure import leave, told
from coresident.engines.pool.processes.parent import die_with
from coresident.engines.pool.sharing import arena


def serve(job: Job, channel: Channel, descriptor: int) -> None:
    """Say `ready` with the seconds the load took, the base's checksum and when (monotonic); repeat the checksum when asked;
    leave when told.
    """
    start = time.monotonic()
    plan = read(Path(job.base)).layout(job.parameters.dtype)
    arena.write(descriptor, plan)
    seconds = time.monotonic() - start
    # Mapped for as long as the pool lives: with one learner, too, the base is then in common with somebody.
    memory = arena.mapping(descriptor, plan)
    total = checksum.of_memory(memory, plan)
    channel.tell("ready", pid=os.getpid(), seconds=seconds, checksum=total, at=time.monotonic())
    while True:
        order = channel.hear()["event"]
        if order == "leave":
            return
        channel.tell("checked", checksum=checksum.of_memory(memory, plan))


def main(arguments: list[str]) -> None:
    """Start from the command line that the driver gives."""
    file, channel_fd, arena_fd, parent = arguments
    die_with(int(parent))
    channel = Channel.inherited(int(channel_fd))
    try:
        with told(channel):
            serve(Job.load(file), channel, int(arena_fd))
    except (Closed, SystemExit):
        leave(1)
    leave(0)


if __name__ == "__main__":
    main(sys.argv[1:])
