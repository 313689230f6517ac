"""One learner as a process: what it does is the same whether it was started as an interpreter or forked from
the zygote.

`python -m coresident.engines.pool.learner_process JOB LEARNER CHANNEL PARENT`

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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coresident.engines.pool.channel import Channel, Closed, line
from coresident.engines.pool.failure import leave, told
from coresident.engines.pool.job import Job, pin
from coresident.engines.pool.parent import die_with
from coresident.errors import InternalError
from coresident.workload import Reporter

if TYPE_CHECKING:
    from torch import Tensor, nn

    from coresident.engines.pool.base import BaseDir
    from coresident.engines.pool.learner import Learner

# The name of each series in a record, and the learner's own name for it.
SERIES = {
    "loss": "loss",
    "chosen_reward": "chosen_reward",
    "rejected_reward": "rejected_reward",
    "margin": "margin",
    "accuracy": "accuracy",
    "grad_norm": "gradient_norm",
    "tokens": "tokens",
}


@dataclass(frozen=True)
class Inherited:
    """What a learner has from its zygote: the model without a number in it, the tokenizer, the arena's
    descriptor. What is None or -1 it makes for itself.
    """

    skeleton: nn.Module | None = None
    tokenizer: Any = None
    arena: int = -1


NOTHING = Inherited()


def learn(job: Job, number: int, channel: Channel, inherited: Inherited = NOTHING) -> None:
    """Be learner `number`, from the first word to the last.

    Raises `Closed` when the driver is gone; every other exception is the caller's to tell.
    """
    cores = pin(job.cores(number))
    # Collecting while thousands of modules are imported finds nothing and takes a sixth of that time.
    gc.disable()
    import torch

    # First of all: a forked child that lets a parallel operation find its parent's thread pool hangs.
    torch.set_num_threads(job.parameters.threads)
    faulthandler.enable()
    channel.tell("alive", pid=os.getpid())

    from coresident.engines.pool import base, checksum, data, fault, loading
    from coresident.engines.pool.learner import Learner
    from coresident.engines.pool.model import attach, base_tensors, build_on_meta
    from coresident.engines.pool.tokenized import batches
    from coresident.text import tokenizer

    settings = job.parameters
    directory = base.read(Path(job.base))
    words = tokenizer.load(directory.path) if inherited.tokenizer is None else inherited.tokenizer
    shard = data.tokens(settings, number, words)
    model = inherited.skeleton
    if model is None:
        model = build_on_meta(directory.path, settings)
    # What is there stays: without this the first collection would look at every module, in the measured time.
    gc.freeze()
    gc.enable()

    start = time.monotonic()
    tensors = hold(job, directory, inherited.arena)
    seconds = time.monotonic() - start
    unguarded = fault.guard(
        loading.ranges(tensors),
        channel.fileno(),
        wrote=line("failed", status="failed", reason="it wrote into the shared base at @"),
        cut=line("failed", status="failed", reason="the base's file was cut short while it was mapped, at @"),
    )
    attach(model, tensors, settings)

    def view() -> dict[str, Tensor]:
        # What the model really uses; the rest of the file (a stored copy of a tied layer) as it was loaded.
        return {**tensors, **base_tensors(model)}

    before = checksum.of_tensors(view())
    channel.tell("loaded", seconds=seconds, checksum=before)

    learner = Learner(model, batches(shard, settings, number), settings)
    reporter = Reporter(events=Path(job.events), work=Path(job.work))
    with _series_reported(learner, reporter, number):
        learner.step()
        channel.tell("barrier")
        _wait_for(channel, "measure")
        channel.tell("memory", **measured(loading.ranges(base_tensors(model))))
        _wait_for(channel, "go")
        window = _train(learner, settings.steps, channel)

    after = checksum.of_tensors(view())
    adapter = _export(model, Path(job.work), number)
    name = f"learner-{number}"
    reporter.digest(f"{name}.adapter", adapter)
    reporter.worker(name, window["start"], window["end"], window["tokens"], "tokens")
    reporter.environment(_versions())
    # `unguarded`: why a write into the base would go unnamed, or null.
    reporter.environment(
        {name: {"affinity": cores, "threads": torch.get_num_threads(), "unguarded": unguarded}}
    )
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
    )


def hold(job: Job, directory: BaseDir, arena: int) -> dict[str, Tensor]:
    """The base's tensors, held as the job says: `private`, `mapped`, or in the arena behind the descriptor
    `arena`.
    """
    from coresident.engines.pool import arena as arenas
    from coresident.engines.pool import loading

    dtype = job.parameters.dtype
    if job.hold == "private":
        return loading.private(directory, dtype)
    if job.hold == "mapped":
        return loading.mapped(directory, dtype)
    return arenas.attach(arena, directory.layout(dtype))


def measured(ranges: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """This process's memory now: `pss` in bytes (0: unreadable), and how it holds its base (`held`, None:
    unreadable).
    """
    from coresident.engines.pool import sharing

    found: dict[str, Any] = {"pss": 0, "held": None}
    with contextlib.suppress(OSError):
        found["held"] = asdict(sharing.held(ranges.values()))
    with contextlib.suppress(OSError):
        found["pss"] = sharing.pss()
    return found


def _train(learner: Learner, steps: int, channel: Channel) -> dict[str, Any]:
    start = time.monotonic()
    results = []
    while learner.steps < steps:
        results.append(learner.step())
        channel.tell("step", step=learner.steps)
    end = time.monotonic()
    return {
        "start": start,
        "end": end,
        "tokens": sum(result.tokens for result in results),
        "step_ms": 1000 * statistics.median(result.seconds for result in results),
    }


@contextlib.contextmanager
def _series_reported(learner: Learner, reporter: Reporter, number: int) -> Iterator[None]:
    """Whatever ends the training, the steps that were done are on record."""
    try:
        yield
    finally:
        for name, key in SERIES.items():
            reporter.series(f"learner-{number}.{name}", learner.series[key])


def _export(model: nn.Module, work: Path, number: int) -> str:
    from coresident.engines.pool.adapter import export

    return export(model, work / f"learner-{number}")


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "peft", "safetensors", "tokenizers")
    return {name: version for name in names if (version := getattr(sys.modules.get(name), "__version__", ""))}


def _wait_for(channel: Channel, order: str) -> None:
    heard = channel.hear()["event"]
    if heard != order:
        raise InternalError(f"a learner waiting for {order!r} was told {heard!r}")


def main(arguments: list[str]) -> None:
    """Start from the command line that the driver gives."""
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
    main(sys.argv[1:])
