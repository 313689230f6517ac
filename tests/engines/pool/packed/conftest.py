"""A pack beside the same learners alone, on a tiny base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coresident.engines.pool.learning import data
from coresident.engines.pool.learning.learner import Learner
from coresident.engines.pool.learning.tokenized import batches, planned
from coresident.engines.pool.packed.arena import draw
from coresident.engines.pool.packed.pack import Pack, Plan
from coresident.engines.pool.packed.policy import Policy
from coresident.engines.pool.parameters import DPO
from coresident.text import tokenizer


@pytest.fixture
def make(tiny_base: Path, build: Any) -> Callable[..., Pack]:
    """Builds the pack of `settings.learners` learners."""

    def made(settings: DPO, **options: Any) -> Pack:
        policy = Policy(build(settings))
        plans = []
        for number in range(settings.learners):
            own = settings.of(number)
            shard = data.tokens(own, number, tokenizer.load(tiny_base))
            start = draw(policy.layers, own.rank, own.seed)
            plans.append(Plan(own, planned(shard, own), batches(shard, own, number), start))
        return Pack(policy, plans, **options)

    return made


@pytest.fixture
def alone(tiny_base: Path, build: Any) -> Callable[..., Learner]:
    """Builds learner `number` of `settings` as it is alone."""

    def made(settings: DPO, number: int) -> Learner:
        own = settings.of(number)
        shard = data.tokens(own, number, tokenizer.load(tiny_base))
        return Learner(build(own), batches(shard, own, number), own)

    return made
