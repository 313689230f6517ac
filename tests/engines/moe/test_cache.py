"""What is resident: the state machine that decoder and simulator share."""

import pytest

from coresident.engines.moe.cache import Cache, require
from coresident.engines.moe.policies import policy
from coresident.errors import InternalError, UserError


def _cache(*capacities: int, experts: int = 8) -> Cache:
    return Cache(policy("lru", len(capacities), experts), capacities, experts)


def test_hits_are_those_resident_before_the_step_and_fills_go_by_ascending_id() -> None:
    cache = _cache(4)
    assert cache.step(0, [3, 1]).fills == ((1, None), (3, None))
    step = cache.step(0, [5, 3, 0])
    assert step.hits == 1
    assert step.fills == ((0, None), (5, None))
    assert cache.step(0, [6, 4]).fills == ((4, 1), (6, 0))
    assert cache.resident[0] == {3, 4, 5, 6}


def test_a_step_never_evicts_what_it_needs() -> None:
    cache = _cache(3)
    for step in ([0, 1, 2], [2, 3, 4], [0, 4, 5], [5, 6, 7]):
        cache.step(0, step)
        assert set(step) <= cache.resident[0]
        assert len(cache.resident[0]) <= 3


def test_counts_tell_complete_steps_and_misses_of_each_layer() -> None:
    cache = _cache(4, 2)
    cache.step(0, [0, 1])
    cache.step(0, [0, 1])
    cache.step(0, [1, 2])
    cache.step(1, [5, 6])
    assert (cache.decoded[0].steps, cache.decoded[0].complete) == (3, 1)
    assert (cache.decoded[0].hits, cache.decoded[0].misses) == (3, 3)
    assert (cache.decoded[1].hits, cache.decoded[1].misses) == (0, 2)


def test_a_prefill_goes_in_ascending_waves_and_is_counted_apart() -> None:
    cache = _cache(3)
    waves = []
    for wave, step in cache.prefill(0, [6, 1, 4, 2, 7, 1]):
        assert set(wave) <= cache.resident[0]
        waves.append((wave, step.hits))
    assert waves == [([1, 2, 4], 0), ([6, 7], 0)]
    assert cache.prefilled[0].accesses == 5
    assert cache.decoded[0].accesses == 0


def test_a_wave_is_filled_only_when_it_is_asked_for() -> None:
    cache = _cache(2)
    waves = cache.prefill(0, [0, 1, 2, 3])
    next(waves)
    assert cache.resident[0] == {0, 1}
    next(waves)
    assert cache.resident[0] == {2, 3}


def test_fetching_ahead_makes_hits_and_is_told_from_waste() -> None:
    cache = _cache(3)
    cache.step(0, [0, 1])
    assert cache.prefetch(0, [4, 5]) == ((4, None), (5, 0))
    assert cache.step(0, [4]).hits == 1
    cache.step(0, [6, 7])
    assert (cache.ahead[0].issued, cache.ahead[0].used, cache.ahead[0].wasted) == (2, 1, 1)


def test_fetching_ahead_leaves_residents_and_what_is_kept() -> None:
    cache = _cache(3)
    cache.step(0, [0, 1, 2])
    assert cache.prefetch(0, [1]) == ()
    assert cache.prefetch(0, [4, 5], keep=[0, 1, 2]) == ()
    assert cache.prefetch(0, [4, 5], keep=[0, 1]) == ((4, 2),)


def test_no_more_is_fetched_ahead_than_there_is_room_for() -> None:
    cache = _cache(2)
    assert [expert for expert, _ in cache.prefetch(0, [7, 6, 5, 4])] == [7, 6]
    assert cache.resident[0] == {6, 7}


def test_clearing_counts_what_was_never_used() -> None:
    cache = _cache(2)
    cache.prefetch(0, [3])
    cache.clear()
    assert cache.ahead[0].wasted == 1
    assert cache.step(0, [3]).hits == 0


@pytest.mark.parametrize("step", [[1, 2, 3], [1, 1]])
def test_a_step_beyond_the_slots_or_with_one_expert_twice_is_our_own_bug(step: list[int]) -> None:
    with pytest.raises(InternalError, match="a step of"):
        _cache(2).step(0, step)


@pytest.mark.parametrize("capacity", [0, 9])
def test_slots_are_between_one_and_all(capacity: int) -> None:
    with pytest.raises(UserError, match=f"layer 1: {capacity} slots for 8 experts"):
        _cache(4, capacity)


def test_fewer_slots_than_a_token_needs_are_refused() -> None:
    require([8, 8], 8)
    with pytest.raises(UserError, match="layer 1: 7 slots cannot hold the 8 experts"):
        require([8, 7], 8)
