"""One learner as a process: what it does is the same whether it was started as an interpreter or forked from
the zygote.

`python -m coresident.engines.pool.processes.learner_process JOB LEARNER CHANNEL PARENT`

It holds the base as the job says, checksums it, trains one step, waits with all others at the barrier, trains
the rest, checksums again and exports. The first step is real training; it is outside the window in which
throughput is counted.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coresident.engines.pool.card import deterministic
from coresident.engines.pool.job import Job, pin
from coresident.engines.pool.processes import holding, untouched
from coresident.engines.pool.processes.channel import Channel, Closed, wait_for
from coresident.engines.pool.processes.failure import leave, told
from coresident.engines.pool.processes.parent import die_with
from coresident.workload import Reporter

if TYPE_CHECKING:
    from torch import nn

    from coresident.engines.pool.base.base import BaseDir
    from coresident.engines.pool.learning.training import Session
    from coresident.engines.pool.parameters import DPO

# What a record calls a series where the learner has another name for it.
RECORDED = {"gradient_norm": "grad_norm"}


@dataclass(frozen=True)
class Inherited:
    """What a learner has from its zygote: the model without a number in it (by rank and alpha), the tokenizer, the arena's
    descriptor. What is missing or -1 it makes for itself.
    """

    skeletons: Mapping[tuple[int, float], nn.Module] = field(default_factory=dict)
    tokenizer: Any = None
    arena: int = -1


NOTHING = Inherited()


def learn(job: Job, number: int, channel: Channel, inherited: Inherited = NOTHING) -> None:
    """Be learner `number`, from the first word to the last.

    Raises `Closed` when the driver is gone; every other exception is the caller's to tell.
    """
    stages = Stages()
    cores = pin(job.cores(number))
    # Collecting while thousands of modules are imported finds nothing and takes a sixth of that time.
    gc.disable()
    import torch

    # First of all: a forked child that lets a parallel operation find its parent's thread pool hangs.
    torch.set_num_threads(job.parameters.threads)
    faulthandler.enable()
    channel.tell("alive", pid=os.getpid())

    settings = job.parameters.of(number)
    exact = deterministic.apply() if settings.deterministic else {}
    with untouched.imports_alone():
        model, words, directory = made(job, settings, inherited)
        from coresident.engines.pool.learning import data, training
        from coresident.engines.pool.learning.model import attach

        shard = data.tokens(settings, number, words)
    # What is there stays: without this the first collection would look at every module, in the measured time.
    gc.freeze()
    gc.enable()
    stages("made")

    if job.on_card:
        from coresident.engines.pool.card import device

        card = device.start(settings.dtype)
        stages("context")
        start = time.monotonic()
        base = holding.on_card(job, directory, card, channel)
    else:
        start = time.monotonic()
        base = holding.on_host(job, directory, inherited.arena, channel)
    seconds = time.monotonic() - start
    stages("base")
    attach(model, base.tensors, settings)
    stages("attached")
    before = base.checksum(model)
    stages("checksum")
    channel.tell("loaded", seconds=seconds, checksum=before)

    session = training.begin(job, number, model, shard, before, words)
    learner = session.learner
    reporter = Reporter(events=Path(job.events), work=Path(job.work))
    with series_reported({number: learner.series}, reporter), session.rescued():
        if not session.finished:
            session.step()
        learner.settle()
        stages("first step")
        channel.tell("barrier")
        wait_for(channel, "measure")
        channel.tell("memory", **base.memory(model))
        wait_for(channel, "go")
        window = _train(session, channel)

    after = base.checksum(model)
    adapter = session.close()
    name = f"learner-{number}"
    reporter.digest(f"{name}.adapter", adapter)
    reporter.worker(name, window["start"], window["end"], window["tokens"], "tokens")
    reporter.environment(versions())
    facts = {"affinity": cores, "threads": torch.get_num_threads(), "unguarded": base.unguarded}
    reporter.environment({name: {**facts, **exact, "stages": stages.seconds}})
    losses = learner.series["loss"]
    channel.tell(
        "learned",
        **window,
        before=before,
        after=after,
        adapter=adapter,
        first_loss=losses[0],
        last_loss=losses[-1],
        steps=len(losses),
        planned=session.planned,
    )


class Stages:
    """How long each part of a start took, in seconds since the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def __call__(self, name: str) -> None:
        """The part `name` is over."""
        now = time.monotonic()
        self.seconds[name] = round(now - self._last, 4)
        self._last = now


def made(job: Job, settings: DPO, inherited: Inherited = NOTHING) -> tuple[nn.Module, Any, BaseDir]:
    """The model without a number in it, the tokenizer, and what the base's directory holds."""
    from coresident.engines.pool.base import base
    from coresident.engines.pool.learning.model import build_on_meta
    from coresident.text import tokenizer

    directory = base.read(Path(job.base))
    words = tokenizer.load(directory.path) if inherited.tokenizer is None else inherited.tokenizer
    model = inherited.skeletons.get((settings.rank, settings.alpha))
    if model is None:
        model = build_on_meta(directory.path, settings)
    return model, words, directory


def _train(session: Session, channel: Channel) -> dict[str, Any]:
    learner = session.learner
    start = time.monotonic()
    results = []
    while not session.over:
        results.append(session.step())
        channel.tell("step", step=learner.steps)
    learner.settle()
    end = time.monotonic()
    return {
        "start": start,
        "end": end,
        "tokens": sum(result.tokens for result in results),
        "step_ms": 1000 * statistics.median(result.seconds for result in results) if results else 0.0,
    }


@contextlib.contextmanager
def series_reported(series: Mapping[int, Mapping[str, list[float]]], reporter: Reporter) -> Iterator[None]:
    """Whatever ends the training of these learners, the steps that were done are on record."""
    try:
        yield
    finally:
        for number, named in series.items():
            for name, values in named.items():
                reporter.series(f"learner-{number}.{RECORDED.get(name, name)}", values)


def versions() -> dict[str, str]:
    """Versions of what computes, as this process has them."""
    names = ("torch", "transformers", "peft", "safetensors", "tokenizers")
    return {name: version for name in names if (version := getattr(sys.modules.get(name), "__version__", ""))}


def main(arguments: list[str], learn: Callable[[Job, int, Channel], None]) -> None:
    """Start from the command line that the driver gives, and `learn`."""
    file, number, channel_fd, parent = arguments
    die_with(int(parent))
    channel = Channel.inherited(int(channel_fd))
    try:
        with told(channel):
            learn(Job.load(file), int(number), channel)
    except (Closed, SystemExit):
        leave(1)
    leave(0)


if __name__ == "__main__":
    main(sys.argv[1:], learn)
