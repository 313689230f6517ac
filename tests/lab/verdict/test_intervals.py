"""Intervals: known quantiles, constant data, few data, huge data; the bootstrap only ever widens; rates are
exact.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from coresident.lab.verdict import intervals
from coresident.lab.verdict.intervals import Interval, interval, rate, t_quantile


@pytest.mark.parametrize(("freedom", "quantile"), [(2, 6.965), (4, 3.747), (8, 2.896), (30, 2.457)])
def test_t_quantiles_are_those_of_the_tables_at_98_percent(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=5e-4)


def test_three_values_have_the_t_interval_worked_out_by_hand() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found is not None
    # Mean 2, deviation 1: half the width is 6.9646 / sqrt(3).
    assert (found.estimate, found.low, found.high) == pytest.approx((2.0, 2 - 4.0210, 2 + 4.0210), abs=1e-3)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 1.0]])
def test_fewer_than_three_values_have_no_interval_even_if_they_are_equal(values: list[float]) -> None:
    assert interval(values, floor=0.01) is None


@pytest.mark.parametrize("value", [0.1, 0.0, -7.3, 1e300, 5e-324])
@pytest.mark.parametrize("count", [3, 9, 12])
def test_constant_data_have_an_interval_as_wide_as_the_floor(value: float, count: int) -> None:
    assert interval([value] * count) == Interval(value, value, value)
    assert interval([value] * count, floor=0.5) == Interval(value, value - 0.5, value + 0.5)


def test_the_floor_is_added_at_both_sides() -> None:
    bare, floored = interval([1.0, 2.0, 4.0]), interval([1.0, 2.0, 4.0], floor=0.25)
    assert bare is not None and floored is not None
    assert floored.low == pytest.approx(bare.low - 0.25)
    assert floored.high == pytest.approx(bare.high + 0.25)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_interval(bad: float) -> None:
    assert interval([1.0, 2.0, bad]) is None


def test_numbers_near_the_largest_do_not_become_nan() -> None:
    assert interval([1e308, -1e308, 1e308]) is None
    found = interval([1e307, 1.1e307, 1.2e307])
    assert found is not None and found.estimate == pytest.approx(1.1e307)


def test_below_ten_values_the_interval_is_the_t_interval_alone() -> None:
    values = np.random.default_rng(1).exponential(size=9).tolist()
    low, high = stats.t.interval(0.98, 8, np.mean(values), stats.sem(values))
    found = interval(values)
    assert found is not None and (found.low, found.high) == pytest.approx((low, high))


def test_from_ten_values_on_the_bootstrap_can_only_widen_it() -> None:
    widened = 0
    for seed in range(300):
        values = np.random.default_rng(seed).pareto(1.2, size=10).tolist()
        low, high = stats.t.interval(0.98, 9, np.mean(values), stats.sem(values))
        found = interval(values)
        assert found is not None
        assert found.low <= low + 1e-9 and found.high >= high - 1e-9
        widened += found.high > high + 1e-9
    assert widened > 0


def test_the_bootstrap_agrees_with_scipy_and_is_the_same_every_time() -> None:
    values = np.array([0.0] * 9 + [1.0])
    # One value in ten stands out: the upper percentile lies beyond what t gives.
    found = interval(values.tolist())
    assert found is not None and found == interval(values.tolist())
    sciped = stats.bootstrap(
        (values,), np.mean, confidence_level=0.98, n_resamples=20_000, method="percentile", rng=1
    ).confidence_interval
    assert found.high == pytest.approx(max(sciped.high, 0.1 + t_quantile(9) * 0.1), abs=0.02)


def test_half_width_is_relative_to_the_estimate() -> None:
    assert Interval(2.0, 1.9, 2.1).half_width == pytest.approx(0.05)
    assert Interval(-2.0, -2.1, -1.9).half_width == pytest.approx(0.05)
    assert Interval(0.0, -0.1, 0.1).half_width == math.inf
    assert Interval(0.0, 0.0, 0.0).half_width == 0.0


@pytest.mark.parametrize(("hits", "trials"), [(0, 3), (3, 3), (7, 9), (1, 50)])
def test_a_rate_has_the_exact_interval_of_clopper_and_pearson(hits: int, trials: int) -> None:
    exact = stats.binomtest(hits, trials).proportion_ci(confidence_level=0.98, method="exact")
    found = rate(hits, trials)
    assert found is not None
    assert (found.estimate, found.low, found.high) == pytest.approx((hits / trials, exact.low, exact.high))


def test_fewer_than_three_trials_have_no_rate() -> None:
    assert rate(2, 2) is None


def test_a_rates_interval_misses_the_truth_in_at_most_two_of_a_hundred_studies() -> None:
    for trials in (3, 9, 30):
        for truth in np.linspace(0.02, 0.98, 25):
            missed = 0.0
            for hits in range(trials + 1):
                found = rate(hits, trials)
                assert found is not None
                if not found.low <= truth <= found.high:
                    missed += stats.binom.pmf(hits, trials, truth)
            assert missed <= 0.02 + 1e-12


def test_the_level_is_98_percent() -> None:
    assert intervals.CONFIDENCE == 0.98
