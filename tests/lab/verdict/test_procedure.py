"""The decision procedure on numbers alone: pairing, floors, slopes, sides of limits, and when to stop."""

from __future__ import annotations

import math

import numpy as np
import pytest

from coresident.lab.verdict import procedure
from coresident.lab.verdict.intervals import Interval
from coresident.lab.verdict.model import State

INF = math.inf


def test_a_ratio_is_the_geometric_mean_of_the_blocks_ratios() -> None:
    found = procedure.ratio([(2.0, 1.0), (8.0, 1.0), (4.0, 1.0)], floor=0.0)
    assert found is not None and found.estimate == pytest.approx(4.0)


def test_what_moves_both_arms_of_a_block_leaves_no_trace() -> None:
    found = procedure.ratio([(1.1 * hour, hour) for hour in (1.0, 30.0, 7.0)], floor=0.0)
    assert found is not None and found.half_width < 1e-12


def test_equal_blocks_have_a_ratio_as_wide_as_the_floor() -> None:
    assert procedure.ratio([(3.0, 2.0)] * 3, floor=0.01) == Interval(
        pytest.approx(1.5), pytest.approx(1.5 / 1.01), pytest.approx(1.5 * 1.01)
    )


@pytest.mark.parametrize("pair", [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (-1.0, -1.0)])
def test_what_is_not_positive_has_no_ratio(pair: tuple[float, float]) -> None:
    assert procedure.ratio([(1.0, 1.0), (1.0, 1.0), pair], floor=0.01) is None


def test_a_ratio_beyond_all_numbers_is_none_not_infinite() -> None:
    assert procedure.ratio([(1e300, 1e-300), (1.0, 1.0), (1.0, 1.0)], floor=0.0) is None


def test_a_values_floor_is_relative_to_its_size() -> None:
    assert procedure.value([-200.0] * 3, floor=0.01) == Interval(-200.0, -202.0, -198.0)
    assert procedure.value([1.0, 1.0], floor=0.01) is None


def test_numbers_too_large_to_compute_with_have_no_interval() -> None:
    assert procedure.value([1.7e308] * 3, floor=0.5) is None
    assert math.isnan(procedure.slope([1.0, 2.0, 8.0], [-1.7e308, 0.0, 1.7e308]))
    assert procedure.value([math.nan] * 3, floor=0.0) is None


def test_a_slope_is_the_least_squares_one() -> None:
    levels, values = [1.0, 2.0, 4.0, 8.0], [3.0, 5.5, 9.0, 17.0]
    assert procedure.slope(levels, values) == pytest.approx(np.polyfit(levels, values, 1)[0])
    assert procedure.slope([2.0, 4.0], [0.1, 0.1]) == 0.0


@pytest.mark.parametrize(
    ("low", "high", "limits", "state"),
    [
        (0.96, 0.99, (0.95, INF), State.SUPPORTED),
        (0.95, 0.99, (0.95, INF), State.SUPPORTED),
        (0.94, 0.96, (0.95, INF), State.UNDECIDED),
        (0.90, 0.94, (0.95, INF), State.REFUTED),
        (0.90, 0.95, (0.95, INF), State.UNDECIDED),
        (1.00, 1.90, (-INF, 2.0), State.SUPPORTED),
        (1.90, 2.10, (-INF, 2.0), State.UNDECIDED),
        (2.10, 2.20, (-INF, 2.0), State.REFUTED),
        (0.95, 1.05, (0.9, 1.1), State.SUPPORTED),
        (0.85, 1.05, (0.9, 1.1), State.UNDECIDED),
        (0.50, 1.50, (0.9, 1.1), State.UNDECIDED),
        (0.70, 0.80, (0.9, 1.1), State.REFUTED),
        (1.20, 1.30, (0.9, 1.1), State.REFUTED),
    ],
)
def test_only_a_whole_interval_on_one_side_decides(
    low: float, high: float, limits: tuple[float, float], state: State
) -> None:
    assert procedure.decide(Interval((low + high) / 2, low, high), limits) is state


def test_no_interval_decides_nothing() -> None:
    assert procedure.decide(None, (-INF, INF)) is State.UNDECIDED


def test_stopping_needs_a_narrow_interval_that_was_narrow_before_its_newest_block() -> None:
    wide, narrow = Interval(1.0, 0.9, 1.1), Interval(1.0, 0.995, 1.005)
    assert procedure.narrow(narrow, narrow, 0.01)
    assert not procedure.narrow(wide, narrow, 0.01)
    assert not procedure.narrow(narrow, wide, 0.01)
    assert not procedure.narrow(narrow, None, 0.01)
    assert not procedure.narrow(None, None, 0.01)


def test_a_values_interval_covers_the_truth_in_98_of_100_studies() -> None:
    random = np.random.default_rng(7)
    for blocks in (3, 5, 9, 12):
        missed = 0
        for values in random.normal(100.0, 2.0, size=(2000, blocks)).tolist():
            found = procedure.value(values, floor=0.0)
            assert found is not None
            missed += not found.low <= 100.0 <= found.high
        assert missed / 2000 <= 0.03
