"""One learner, with the test in the driver's place: what it says, and what becomes of one that writes into
its base.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from coresident.engines.pool.base import base
from coresident.engines.pool.findings import Learned, base_unchanged
from coresident.engines.pool.job import Hold, Job
from coresident.engines.pool.learning.model import build_on_meta
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.processes.channel import Channel, Closed, pair
from coresident.engines.pool.processes.failure import leave, told
from coresident.engines.pool.processes.learner_process import Inherited, learn
from coresident.engines.pool.sharing import arena, fault

Tamper = Callable[[nn.Module], None]
LAYER = "base_model.model.model.layers.1.mlp.up_proj.base_layer"


@pytest.fixture
def job(tiny_base: Path, tmp_path: Path) -> Callable[[Hold], Job]:
    settings = DPO.model_validate(
        {"base": {"path": str(tiny_base)}, "steps": 3, "max_length": 48, "learners": 1, "rank": 4}
    )

    def of(hold: Hold) -> Job:
        events = str(tmp_path / "events")
        return Job(
            parameters=settings, hold=hold, base=str(tiny_base), events=events, work=str(tmp_path), cpus=[[0]]
        )

    return of


@pytest.fixture
def start(tiny_base: Path) -> Iterator[Callable[[Job, Tamper], tuple[Channel, int]]]:
    """Fork a learner as the zygote does, with a skeleton that `tamper` has changed."""
    plan = base.read(tiny_base).layout("float32")
    descriptor = arena.create(plan.size)
    arena.write(descriptor, plan)

    def forked(job: Job, tamper: Tamper) -> tuple[Channel, int]:
        skeleton = build_on_meta(tiny_base, job.parameters)
        tamper(skeleton)
        ours, theirs = pair()
        child = os.fork()
        if child == 0:
            ours.close()
            try:
                channel = Channel(theirs)
                with told(channel):
                    learn(
                        job,
                        0,
                        channel,
                        Inherited({(job.parameters.rank, job.parameters.alpha): skeleton}, arena=descriptor),
                    )
            except (Closed, SystemExit):
                leave(1)
            leave(0)
        theirs.close()
        return ours, child

    yield forked
    os.close(descriptor)


def play(channel: Channel) -> list[Mapping[str, Any]]:
    """Be the driver until the learner is through or says that it failed."""
    heard = []
    while True:
        message = channel.hear()
        heard.append(message)
        if message["event"] == "barrier":
            channel.tell("measure")
        elif message["event"] == "memory":
            channel.tell("go")
        elif message["event"] in ("learned", "failed"):
            return heard


def code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_place(step: int, act: Callable[[torch.Tensor], object]) -> Tamper:
    """Do `act` on a base weight in the forward pass of step `step` (from 1; each step has two passes)."""

    def tamper(model: nn.Module) -> None:
        passes = iter(range(1000))
        layer = model.get_submodule(LAYER)
        layer.register_forward_pre_hook(
            lambda module, _: act(module.weight.data) if next(passes) == 2 * (step - 1) else None
        )

    return tamper


def untouched(_: nn.Module) -> None:
    """A learner as it should be."""


def test_a_learner_says_where_it_is_and_waits_at_the_barrier(job: Any, start: Any) -> None:
    channel, child = start(job("private"), untouched)
    events = [message["event"] for message in play(channel)]
    assert events == ["alive", "loaded", "barrier", "memory", "step", "step", "learned"]
    assert code(child) == 0


def test_however_the_base_is_held_the_learner_learns_the_same(job: Any, start: Any, tmp_path: Path) -> None:
    learned = []
    for hold in ("private", "mapped", "arena"):
        channel, child = start(job(hold), untouched)
        heard = play(channel)
        assert code(child) == 0
        last = heard[-1]
        learned.append(
            (last["adapter"], last["first_loss"], last["last_loss"], last["before"], last["after"])
        )
        (tmp_path / "learner-0").rename(tmp_path / f"kept-{hold}")
    assert learned[0] == learned[1] == learned[2]


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("hold", ["arena", "mapped"])
def test_a_write_into_the_shared_base_ends_the_learner_and_names_the_tensor(
    job: Any, start: Any, hold: Hold, step: int
) -> None:
    channel, child = start(job(hold), in_place(step, lambda weight: weight.add_(1e-3)))
    last = play(channel)[-1]
    assert last["event"] == "failed"
    assert last["reason"] == "it wrote into the shared base at model.layers.1.mlp.up_proj.weight"
    assert code(child) == fault.EXIT


def test_a_flipped_bit_in_a_private_copy_is_caught(job: Any, start: Any) -> None:
    def flip(weight: torch.Tensor) -> None:
        weight.view(torch.int32)[0, 0] ^= 1

    channel, child = start(job("private"), in_place(2, flip))
    last = dict(play(channel)[-1])
    assert code(child) == 0
    del last["event"]
    decision = base_unchanged({0: Learned(**last)}, {})
    assert decision.passed is False
    assert decision.reason == "learner 0's base changed while it trained"
    # Before the first step, too: then it differs from its siblings.
    sibling = replace(Learned(**last), after=last["before"])
    changed = replace(sibling, before=last["after"], after=last["after"])
    assert base_unchanged({0: sibling, 1: changed}, {}).passed is False


def test_a_learner_whose_driver_is_gone_ends(job: Any, start: Any) -> None:
    channel, child = start(job("private"), untouched)
    while channel.hear()["event"] != "barrier":
        pass
    channel.close()
    assert code(child) == 1
