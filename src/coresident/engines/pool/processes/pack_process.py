"""All learners of a pack as one process: the arm `packed`.

`python -m coresident.engines.pool.processes.pack_process JOB CHANNEL PARENT`

Its course is a learner's (`learner_process`): it holds the base, checksums it, trains one step, waits at the barrier,
trains the rest, checksums again and exports; then it tells of each learner by itself.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coresident.engines.pool.card import deterministic
from coresident.engines.pool.job import Job, pin
from coresident.engines.pool.processes import holding, untouched
from coresident.engines.pool.processes.channel import Channel, Closed, wait_for
from coresident.engines.pool.processes.failure import leave, told
from coresident.engines.pool.processes.learner_process import Stages, made, series_reported, versions
from coresident.engines.pool.processes.parent import die_with
from coresident.workload import Reporter

if TYPE_CHECKING:
    from torch import nn

    from coresident.engines.pool.learning.learner import StepResult
    from coresident.engines.pool.packed.pack import Pack
    from coresident.engines.pool.packed.training import Session
    from coresident.engines.pool.parameters import DPO


@dataclass
class Window:
    """What happened between the barrier and the end, by learner: real tokens, when its last step was over, and how long its
    steps took.
    """

    start: float
    tokens: dict[int, int] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, list[float]] = field(default_factory=dict)

    def note(self, results: Iterable[tuple[int, StepResult]]) -> None:
        """Count what was done by now."""
        now = time.monotonic()
        for number, result in results:
            self.tokens[number] = self.tokens.get(number, 0) + result.tokens
            self.ends[number] = now
            self.seconds.setdefault(number, []).append(result.seconds)


class Stopped(FloatingPointError):  # noqa: N818 - it is an outcome
    """A learner is no longer finite, and that ends the pool."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


def learn(job: Job, channel: Channel) -> None:
    """Be the pack, from the first word to the last. Raises `Closed` when the driver is gone."""
    stages = Stages()
    cores = pin(job.cores(0))
    gc.disable()
    import torch

    torch.set_num_threads(job.parameters.threads)
    faulthandler.enable()
    channel.tell("alive", pid=os.getpid())
    settings = job.parameters
    exact = deterministic.apply() if settings.deterministic else {}
    with untouched.imports_alone():
        # Its adapters are the pack's: the model's own are made as small as may be.
        model, words, directory = made(job, settings.model_copy(update={"rank": 1}))
        from coresident.engines.pool.learning.learner import NonFinite
        from coresident.engines.pool.learning.model import attach
        from coresident.engines.pool.packed import training

        shards = training.shards(settings, words)
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
        base = holding.on_host(job, directory, -1, channel)
    seconds = time.monotonic() - start
    stages("base")
    attach(model, base.tensors, settings.model_copy(update={"rank": 1}))
    stages("attached")
    before = base.checksum(model)
    stages("checksum")
    channel.tell("loaded", seconds=seconds, checksum=before)

    session = training.begin(job, model, shards, before)
    pack = session.pack
    stages("pack")
    reporter = Reporter(events=Path(job.events), work=Path(job.work))
    try:
        with series_reported(dict(enumerate(pack.series)), reporter):
            if not pack.over:
                _stepped(session, channel)
                _settled(session)
            stages("first step")
            channel.tell("barrier")
            wait_for(channel, "measure")
            channel.tell("memory", **base.memory(model))
            wait_for(channel, "go")
            window = _train(session, channel)
    except Stopped:
        pack.close()
        _keep_last_good(session, model)
        raise
    session.close()
    _keep_last_good(session, model)
    after = base.checksum(model)
    facts = {"affinity": cores, "threads": torch.get_num_threads(), "unguarded": base.unguarded}
    facts |= {"step": pack.kind, "fill": round(pack.fill, 4), "failed": pack.failed}
    reporter.environment(versions())
    reporter.environment({"pack": {**facts, **exact, "stages": stages.seconds}})
    for number in range(settings.learners):
        if number in pack.failed:
            channel.tell("result", learner=number, status="nonfinite", reason=pack.failed[number])
            continue
        try:
            digest = session.export(number, _described(model, settings.of(number)))
        except NonFinite as error:
            # Its last step was finite, and what it left is not: its own end, not its siblings'.
            if settings.on_failure == "stop":
                raise Stopped(number, str(error)) from None
            channel.tell("result", learner=number, status="nonfinite", reason=str(error))
            continue
        channel.tell("result", learner=number, **_result(pack, number, window, before, after, digest))
        reporter.digest(f"learner-{number}.adapter", digest)
        reporter.worker(
            f"learner-{number}", window.start, window.ends[number], window.tokens.get(number, 0), "tokens"
        )
    channel.tell("learned")


def _result(
    pack: Pack, number: int, window: Window, before: str, after: str, digest: str
) -> Mapping[str, Any]:
    losses = pack.series[number]["loss"]
    seconds = window.seconds.get(number)
    return {
        "start": window.start,
        "end": window.ends[number],
        "tokens": window.tokens.get(number, 0),
        "step_ms": 1000 * statistics.median(seconds) if seconds else 0.0,
        "before": before,
        "after": after,
        "adapter": digest,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "steps": len(losses),
        "planned": pack.planned(number),
    }


def _keep_last_good(session: Session, model: nn.Module) -> None:
    from coresident.engines.pool.learning.learner import NonFinite

    for number in session.pack.failed:
        # As a learner alone: one that overflowed in its last good step has nothing to keep.
        with suppress(NonFinite):
            session.export(number, _described(model, session.job.parameters.of(number)))


def _described(model: nn.Module, own: DPO) -> str:
    """A learner's `adapter_config.json`."""
    from coresident.engines.pool.learning import adapter

    alpha = int(own.alpha) if own.alpha == int(own.alpha) else own.alpha
    return adapter.config(model, r=own.rank, lora_alpha=alpha)


def _stepped(session: Session, channel: Channel) -> list[tuple[int, StepResult]]:
    results = session.step()
    channel.tell("step", step=session.pack.step_number)
    _check(session)
    return results


def _settled(session: Session) -> list[tuple[int, StepResult]]:
    results = session.settle()
    _check(session)
    return results


def _check(session: Session) -> None:
    if session.pack.failed and session.job.parameters.on_failure == "stop":
        raise Stopped(*min(session.pack.failed.items()))


def _train(session: Session, channel: Channel) -> Window:
    window = Window(time.monotonic())
    while not session.over:
        window.note(_stepped(session, channel))
    window.note(_settled(session))
    for number in range(session.job.parameters.learners):
        # One whose steps were over before the barrier did nothing since.
        window.ends.setdefault(number, time.monotonic())
    return window


def main(arguments: list[str]) -> None:
    """Start from the command line that the driver gives."""
    file, channel_fd, parent = arguments
    die_with(int(parent))
    channel = Channel.inherited(int(channel_fd))
    try:
        with told(channel):
            try:
                learn(Job.load(file), channel)
            except Stopped as stopped:
                name, reason = f"learner {stopped.number}", str(stopped)
                channel.tell("failed", member=name, status="nonfinite", reason=reason)
                raise SystemExit(1) from None
    except (Closed, SystemExit):
        leave(1)
    leave(0)


if __name__ == "__main__":
    main(sys.argv[1:])
