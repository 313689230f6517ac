"""The rows that a foretold run goes through are those that it will train on: no more of them, and of a long run the largest."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from coresident.engines.pool.fit import data
from coresident.engines.pool.fit.forward import Rows
from coresident.engines.pool.inspection import tokenizer_of
from coresident.engines.pool.learning import data as shards
from coresident.engines.pool.learning.tokenized import batches
from coresident.engines.pool.parameters import DPO


def run(**values: Any) -> DPO:
    return DPO.model_validate({"base": {"config": "tiny"}, "max_length": 64} | values)


def trained_on(settings: DPO, learner: int) -> list[Rows]:
    """Every batch of a learner, whole."""
    shard = shards.tokens(settings, learner, tokenizer_of(settings))
    found = []
    for batch in islice(batches(shard, settings, learner), settings.steps):
        sequences, width = batch.input_ids.shape
        found.append(Rows(sequences, width, len(batch.labels), sequences * width - batch.tokens))
    return found


@pytest.mark.parametrize("steps", [2, 4, data.STEPS])
def test_of_a_short_run_every_step_and_none_twice(steps: int) -> None:
    """At one step more it would find another heap, and reserve what it never does."""
    settings = run(steps=steps, learners=2)
    assert data.looked_up(settings) == [trained_on(settings, learner) for learner in range(2)]


def test_of_one_that_its_passes_end_too() -> None:
    settings = run(steps=50, passes=1, learners=1, batch=2, data={"source": "arithmetic", "pairs": 8})
    assert len(data.looked_up(settings)[0]) == 4


def test_of_a_long_run_the_first_steps_and_the_largest_of_all() -> None:
    settings = run(steps=30, learners=1)
    every = trained_on(settings, 0)
    [found] = data.looked_up(settings)
    assert found[: data.STEPS] == every[: data.STEPS]
    rest = found[data.STEPS :]
    assert [max(one.tokens for one in every), max(one.scored for one in every)] == [
        rest[0].tokens,
        rest[1].scored,
    ]
