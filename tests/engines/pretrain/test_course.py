"""Where a training is follows from how many blocks are done."""

from __future__ import annotations

import math

import pytest

from coresident.engines.pretrain.course import Course, rate
from coresident.engines.pretrain.parameters import Schedule


def walked(course: Course) -> list[int]:
    sizes, done = [], 0
    while due := course.due(done):
        sizes.append(due)
        done += due
    assert done == course.blocks
    return sizes


def test_a_virtual_epoch_that_is_no_whole_number_of_updates_ends_on_a_short_one() -> None:
    assert walked(Course(blocks=25, epochs=2, batch=5)) == [5, 5, 2, 5, 5, 3]
    assert walked(Course(blocks=11, epochs=1, batch=32)) == [11]


def test_a_budget_of_updates_has_no_short_one() -> None:
    assert walked(Course(blocks=7 * 4, epochs=3, batch=4, grain=4)) == [4] * 7


@pytest.mark.parametrize(
    ("blocks", "epochs", "batch"), [(25, 2, 5), (398_507, 10, 128), (3, 3, 8), (1000, 7, 9)]
)
def test_every_block_lies_in_one_epoch_and_updates_are_counted_before_they_happen(
    blocks: int, epochs: int, batch: int
) -> None:
    course = Course(blocks, epochs, batch)
    assert course.updates() == len(walked(course))
    assert course.end(epochs - 1) == blocks
    for epoch in range(epochs):
        start = course.end(epoch - 1) if epoch else 0
        assert course.epoch(start) == course.epoch(course.end(epoch) - 1) == epoch
    assert course.epoch(blocks) == epochs


def test_the_rate_rises_linearly_and_falls_as_half_a_cosine_to_its_floor() -> None:
    schedule = Schedule(warmup=0.05, floor=0.1)
    rates = [rate(schedule, 2.0, done, 1000) for done in range(1, 1001)]
    assert rates[24] == pytest.approx(1.0)
    assert rates[49] == pytest.approx(2.0)
    assert rates[524] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rates[-1] == pytest.approx(0.2)
    assert max(rates) == rates[49]
    assert all(math.isfinite(one) and one > 0 for one in rates)


def test_the_rate_is_taken_at_the_updates_end() -> None:
    """The first update learns, and the last has exactly the floor."""
    schedule = Schedule(warmup=0.5, floor=0.0)
    assert rate(schedule, 1.0, 5, 100) == pytest.approx(0.1)
    assert rate(schedule, 1.0, 100, 100) == pytest.approx(0.0)


def test_without_warmup_the_first_update_has_nearly_the_whole_rate() -> None:
    assert rate(Schedule(warmup=0.0), 1.0, 1, 1000) == pytest.approx(1.0, abs=1e-4)
    assert rate(Schedule(warmup=1.0), 1.0, 1000, 1000) == pytest.approx(1.0)
