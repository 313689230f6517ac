"""The golden process on a card: loads the base into one allocation, hands each learner a handle of it, and
outlives every learner. The zygote forks it, before any learner.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from coresident.engines.pool.base.base import read
from coresident.engines.pool.job import Job
from coresident.engines.pool.processes.channel import Channel


def serve(job: Job, channel: Channel) -> None:
    """Say `alive`, then `ready` with the seconds the load took, when it was over (monotonic) and the base's checksum; then one
    `handle` for each learner; repeat the checksum when asked; leave when told.
    """
    import torch

    from coresident.engines.pool.card import device, device_checksum
    from coresident.engines.pool.sharing import ipc

    # First of all: a forked child that lets a parallel operation find its parent's thread pool hangs.
    torch.set_num_threads(1)
    channel.tell("alive", pid=os.getpid())
    card = device.start(job.parameters.dtype)
    start = time.monotonic()
    block = device.load(job.layout(read(Path(job.base))), card)
    seconds = time.monotonic() - start
    channel.tell(
        "ready",
        pid=os.getpid(),
        seconds=seconds,
        checksum=device_checksum.of_block(block.memory, block.plan),
        mps=device.under_mps(),
        at=time.monotonic(),
    )
    for number in range(job.parameters.learners):
        channel.tell("handle", learner=number, **ipc.export(block.memory))
    while channel.hear()["event"] != "leave":
        channel.tell("checked", checksum=device_checksum.of_block(block.memory, block.plan))
