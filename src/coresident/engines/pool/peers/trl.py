"""A learner that is TRL's own: the arm `sharing: trl`, N processes each with its own base and TRL's DPOTrainer.

`python -m coresident.engines.pool.peers.trl JOB LEARNER CHANNEL PARENT`

It keeps a pool learner's conversation with the driver, word for word, so that barrier, windows, memory and controls
are measured as in every other arm. TRL loads the base (by name of its directory), adds the adapter, works out the loss
and steps; what is set is only what the arms must have in common: which pairs in which order, the adapter's first
values, the warm-up (transformers' own is one step later), clip and weight decay.
"""

from __future__ import annotations

import faulthandler
import hashlib
import math
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coresident.engines.pool.job import Job, pin
from coresident.engines.pool.processes.channel import Channel, wait_for
from coresident.engines.pool.processes.learner_process import Stages, main
from coresident.workload import Reporter

if TYPE_CHECKING:
    from torch import Tensor, nn


def learn(job: Job, number: int, channel: Channel) -> None:
    """Be learner `number`, from the first word to the last.

    Raises `Closed` when the driver is gone; every other exception is the caller's to tell.
    """
    stages = Stages()
    cores = pin(job.cores(number))
    import torch

    torch.set_num_threads(job.parameters.threads)
    faulthandler.enable()
    channel.tell("alive", pid=os.getpid())
    settings = job.parameters.of(number)
    exact: dict[str, Any] = {}
    if settings.deterministic:
        from coresident.engines.pool.card import deterministic

        exact = deterministic.apply()
    from coresident.engines.pool.learning import adapter, model
    from coresident.engines.pool.learning.learner import NonFinite
    from coresident.engines.pool.peers.trl_trainer import trainer
    from coresident.text import tokenizer

    words = tokenizer.load(Path(job.base))
    if job.on_card:
        from coresident.engines.pool.card import device

        device.start(settings.dtype)
    stages("made")
    start = time.monotonic()
    peer = trainer(job, number, words)
    seconds = time.monotonic() - start
    stages("trainer")
    base = model.base_tensors(peer.model)
    before = checksum(base)
    stages("checksum")
    channel.tell("loaded", seconds=seconds, checksum=before)

    def barrier() -> None:
        stages("first step")
        channel.tell("barrier")
        wait_for(channel, "measure")
        channel.tell("memory", **_memory(peer.model, on_card=job.on_card))
        wait_for(channel, "go")

    peer.at_barrier, peer.at_step = barrier, lambda step: channel.tell("step", step=step)
    reporter = Reporter(events=Path(job.events), work=Path(job.work))
    name = f"learner-{number}"
    try:
        peer.train()
    finally:
        series = peer.series()
        for key, values in series.items():
            reporter.series(f"{name}.{key}", values)
    losses = series["loss"]
    for step, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            raise NonFinite(f"the loss is {loss} at step {step}")
    after = checksum(model.base_tensors(peer.model))
    digest = adapter.export(peer.model, Path(job.work) / name)
    tokens = int(sum(series["tokens"][1:]))
    reporter.digest(f"{name}.adapter", digest)
    reporter.worker(name, peer.began, peer.ended, tokens, "tokens")
    facts = {
        "affinity": cores,
        "threads": torch.get_num_threads(),
        "stages": stages.seconds,
        "pid": os.getpid(),
    }
    reporter.environment(versions())
    reporter.environment({name: {**facts, **exact}})
    channel.tell(
        "learned",
        start=peer.began,
        end=peer.ended,
        tokens=tokens,
        step_ms=1000 * statistics.median(peer.seconds[1:]),
        before=before,
        after=after,
        adapter=digest,
        first_loss=losses[0],
        last_loss=losses[-1],
        steps=len(losses),
    )


def checksum(tensors: dict[str, Tensor]) -> str:
    """One number over a base wherever its tensors lie; on the CPU it is the other arms' own."""
    from coresident.engines.pool.base import checksum as host

    if not next(iter(tensors.values())).is_cuda:
        return host.of_tensors({name: tensor.detach() for name, tensor in tensors.items()})
    import torch

    from coresident.engines.pool.card.device_checksum import sums

    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(repr(sums(tensor.detach().contiguous().flatten().view(torch.uint8))).encode())
    return total.hexdigest()


def _memory(model: nn.Module, on_card: bool) -> dict[str, Any]:
    from coresident.engines.pool.base import loading
    from coresident.engines.pool.learning.model import base_tensors
    from coresident.engines.pool.sharing import sharing

    found: dict[str, Any] = {"pss": 0, "held": None}
    try:
        found["pss"] = sharing.pss()
        if not on_card:
            found["held"] = asdict(sharing.held(loading.ranges(base_tensors(model)).values()))
    except OSError:
        pass
    if on_card:
        from coresident.engines.pool.card import device
        from coresident.engines.pool.sharing import device_sharing

        found["held"] = asdict(device_sharing.held(base_tensors(model)))
        found["mps"] = device.under_mps()
    return found


def versions() -> dict[str, str]:
    """What did the work."""
    names = ("torch", "trl", "transformers", "peft", "accelerate", "datasets")
    return {name: version for name in names if (version := getattr(sys.modules.get(name), "__version__", ""))}


if __name__ == "__main__":
    main(sys.argv[1:], learn)
