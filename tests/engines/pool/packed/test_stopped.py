"""A learner that stopped: it stays as it was, and costs the others nothing, whatever stopped it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coresident.engines.pool.learning.learner import NonFinite
from coresident.engines.pool.packed.kinds import Kind
from coresident.engines.pool.packed.pack import Pack
from coresident.engines.pool.packed.step import Step
from coresident.engines.pool.packed.written import Written
from coresident.engines.pool.parameters import DPO

KINDS = pytest.mark.parametrize("kind", [Step, Written])


def settings(**second: Any) -> DPO:
    """Three learners of ranks 4, 8 and 16; the last one's steps are over first."""
    own = [{"rank": 4}, {"rank": 8, **second}, {"rank": 16, "steps": 4}]
    given = {
        "sharing": "packed", "learners": 3, "steps": 6, "max_length": 48, "data": {"pairs": 8}, "own": own,
        "learning_rate": 1e-2,
    }  # fmt: skip
    return DPO.model_validate(given)


def run(pack: Pack) -> Pack:
    while not pack.over:
        pack.step()
    pack.close()
    return pack


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@KINDS
def test_a_finite_loss_with_a_gradient_that_is_not_finite_stops_it(
    make: Any, alone: Any, kind: type[Step]
) -> None:
    # Such a beta times a margin of exactly zero is zero, and the loss ln 2.
    asked = settings(beta=1e25)
    with pytest.raises(NonFinite, match="the gradient norm is inf at step 1"):
        alone(asked, 1).step()
    with_it, masked = (run(make(asked, kind=Kind("", kind), masked=these)) for these in ((), {1}))
    assert with_it.failed == {1: "the gradient norm is inf at step 1"}
    assert with_it.series == masked.series
    for number in range(3):
        assert same(with_it.finished[number], masked.finished[number])
    # It is the adapter that it started from.
    assert same(with_it.finished[1], dict(make(asked).arena.parts(1)))


@KINDS
def test_it_stays_stopped_when_its_numbers_are_finite_again(make: Any, kind: type[Step]) -> None:
    pack = make(settings(weight_decay=0.1), kind=Kind("", kind))
    for _ in range(2):
        pack.step()
    arena = pack.arena
    had = [block[1].clone() for block in (arena.masters, *arena.moments)]
    arena.masters[1] = torch.nan
    pack.step()
    assert pack.failed == {1: "the loss is nan at step 3"}
    arena.masters[1] = had[0]
    # One more with the same siblings, and two after the third learner is gone.
    for members in ([0, 1, 2], [0, 1], [0, 1]):
        assert [number for number, _ in pack.step()] == [one for one in members if one != 1]
        assert pack.members == members
        for block, row in zip((arena.masters, *arena.moments), had, strict=True):
            assert torch.equal(block[1], row)
    run(pack)
    assert [len(series["loss"]) for series in pack.series] == [6, 2, 4]
    assert any(value.any() for name, value in pack.finished[1].items() if "lora_B" in name)


def test_one_that_is_masked_never_learns_and_costs_the_others_nothing(make: Any) -> None:
    all_of_them, masked = (run(make(settings(), masked=these)) for these in ((), {1}))
    assert same(masked.finished[1], dict(make(settings()).arena.parts(1)))
    assert not same(masked.finished[1], all_of_them.finished[1])
    for number in (0, 2):
        assert same(masked.finished[number], all_of_them.finished[number])


@KINDS
@pytest.mark.parametrize("second", [{"learning_rate": 1e38}, {"learning_rate": 1e20, "weight_decay": 1e25}])
def test_one_whose_update_overflows_takes_no_sibling_along(
    make: Any, kind: type[Step], second: dict[str, float]
) -> None:
    # What is beyond its rank is no number either: 0 times an infinite step.
    pack = run(make(settings(warmup_steps=0, **second), kind=Kind("", kind)))
    assert pack.failed == {1: "the loss is nan at step 2"}
    assert [len(series["loss"]) for series in pack.series] == [6, 1, 4]
    assert all(value.isfinite().all() for number in (0, 2) for value in pack.finished[number].values())
