"""When fetches arrive, and the bounds that no schedule beats."""

from collections.abc import Callable

import numpy as np
import pytest

from coresident.engines.moe.predictors.fitted import fit
from coresident.engines.moe.predictors.ranking import ranked
from coresident.engines.moe.simulate import bounds
from coresident.engines.moe.simulate.bounds import Cost
from coresident.engines.moe.simulate.play import Prompt, play
from coresident.engines.moe.simulate.timing import timed

_COST = Cost(expert_bytes=1000, bytes_per_second=1e6, resident_seconds=8e-3, sync_seconds=1e-4)


def _prompt(misses: list[list[int]], issued: list[list[int]] | None = None, used: object = None) -> Prompt:
    missed = np.array(misses)
    ahead = np.zeros_like(missed) if issued is None else np.array(issued)
    width = int(ahead.max())
    served = np.zeros((*missed.shape, width), bool) if used is None else np.array(used, dtype=bool)
    return Prompt(3 - missed, missed, ahead, served)


def test_the_bounds_are_those_of_the_text() -> None:
    cost = Cost(expert_bytes=12_582_912, bytes_per_second=55e9, resident_seconds=1 / 1759, sync_seconds=11e-6)
    assert cost.fetch == pytest.approx(228.8e-6, rel=1e-3)
    misses = 16 * 8 * 0.2
    assert bounds.serial(cost, 16, misses) == pytest.approx(
        1 / 1759 + 16 * 11e-6 + misses * 228.8e-6, rel=1e-3
    )
    assert bounds.overlapped(cost, misses) == pytest.approx(misses * 228.8e-6, rel=1e-3)
    assert bounds.overlapped(cost, 1) == pytest.approx(1 / 1759)


def test_a_fetchs_own_seconds_add_to_its_bytes() -> None:
    cost = _COST.model_copy(update={"fetch_seconds": 5e-4})
    assert cost.fetch == pytest.approx(1.5e-3)


def test_demand_alone_takes_the_serial_bound(made: Callable) -> None:
    traces = made(prompts=3)
    prompts = play(traces, (5,) * 4, "lru").prompts
    steps = sum(len(one.misses) for one in prompts)
    misses = sum(int(one.misses.sum()) for one in prompts)
    found = timed(prompts, _COST, depth=1)
    assert found.seconds / steps == pytest.approx(bounds.serial(_COST, 4, misses / steps))
    assert found.stalled == sum(int((one.misses > 0).sum()) for one in prompts)


def test_prompts_of_different_lengths_are_timed_each_by_itself() -> None:
    one, two = _prompt([[1, 0], [2, 1], [0, 3]]), _prompt([[1, 1]])
    together = timed((one, two), _COST, 1)
    assert together.seconds == pytest.approx(
        timed((one,), _COST, 1).seconds + timed((two,), _COST, 1).seconds
    )


def test_a_fetch_ahead_hides_behind_a_layers_computing() -> None:
    # Two layers of 4 ms: one fetch of 1 ms, asked for as layer 0 is known, is there before layer 1 begins.
    ahead = _prompt([[0, 0]], issued=[[0, 1]], used=[[[False], [True]]])
    found = timed((ahead,), _COST, depth=1)
    assert found.seconds == pytest.approx(8e-3 + 2e-4)
    assert (found.late, found.stalled) == (0, 0)


def test_a_fetch_ahead_that_is_late_is_waited_for() -> None:
    slow = _COST.model_copy(update={"bytes_per_second": 2e5})
    ahead = _prompt([[0, 0]], issued=[[0, 1]], used=[[[False], [True]]])
    found = timed((ahead,), slow, depth=1)
    # It is known at 0.1 ms, takes 5, and layer 1 would begin at 4.2.
    assert found.seconds == pytest.approx(0.1e-3 + 5e-3 + 4e-3)
    assert (found.late, found.stalled) == (1, 1)


def test_a_longer_lead_hides_what_a_short_one_cannot() -> None:
    slow = _COST.model_copy(update={"bytes_per_second": 2e5})
    ahead = _prompt([[0, 0, 0]], issued=[[0, 0, 1]], used=[[[False], [False], [True]]])
    assert timed((ahead,), slow, depth=1).late == 1
    assert timed((ahead,), slow, depth=2).late == 0


def test_a_wrong_fetch_ahead_delays_a_miss_behind_it() -> None:
    # The link is busy for 5 ms from 0.1 ms on with what nobody needs; layer 1's miss comes after it.
    slow = _COST.model_copy(update={"bytes_per_second": 2e5})
    wrong = _prompt([[0, 1]], issued=[[0, 1]], used=[[[False], [False]]])
    alone = _prompt([[0, 1]])
    assert timed((wrong,), slow, 1).seconds - timed((alone,), slow, 1).seconds == pytest.approx(0.9e-3)


def test_what_is_first_in_the_order_of_issue_arrives_first() -> None:
    slow = _COST.model_copy(update={"bytes_per_second": 3.5e5})
    first = _prompt([[0, 0]], issued=[[0, 2]], used=[[[0, 0], [1, 0]]])
    second = _prompt([[0, 0]], issued=[[0, 2]], used=[[[0, 0], [0, 1]]])
    assert timed((first,), slow, 1).late == 0
    assert timed((second,), slow, 1).late == 1


def test_no_schedule_beats_the_overlapped_bound(made: Callable) -> None:
    traces = made(prompts=2)
    predicted = ranked(fit("oracle", 1, traces), traces, 3)
    for rate in (1e5, 1e6, 1e8):
        cost = _COST.model_copy(update={"bytes_per_second": rate, "sync_seconds": 0.0})
        prompts = play(traces, (4,) * 4, "lru", "fresh", predicted).prompts
        steps = sum(len(one.misses) for one in prompts)
        needed = sum(int(one.misses.sum() + one.used.sum()) for one in prompts)
        bound = bounds.overlapped(cost, needed / steps)
        assert timed(prompts, cost, 1).seconds / steps >= bound * (1 - 1e-9)
