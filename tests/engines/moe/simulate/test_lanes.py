"""The simulator is the decoder's own cache, in arrays: equal for every policy, capacity and way between prompts."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from coresident.engines.moe.policies import Policy, policy
from coresident.engines.moe.simulate import plain
from coresident.engines.moe.simulate.lanes import Rule
from coresident.engines.moe.simulate.moments import Between
from coresident.engines.moe.simulate.play import play
from coresident.engines.moe.traces.traces import Traces
from coresident.errors import UserError

_CAPACITIES = ((3, 3, 3, 3), (4, 6, 8, 12), (16, 5, 16, 15))
_RULES: tuple[Rule, ...] = ("lru", "lfu", "lfu-decay", "static", "belady")


def _predicted(traces: Traces, width: int) -> list[np.ndarray]:
    """Guesses, some of them right, with gaps at the end as predictors leave them."""
    source = np.random.default_rng(7)
    shape = (traces.layers, traces.model.experts)
    made = [np.argsort(source.random((one.steps, *shape)), axis=-1)[..., :width] for one in traces.prompts]
    for one, guesses in zip(traces.prompts, made, strict=True):
        guesses[::2, :, :3] = one.decoded[::2, :, :width]
        guesses[1::3, :, -1] = -1
        for row in guesses.reshape(-1, width):
            _, first = np.unique(row, return_index=True)
            row[np.setdiff1d(np.arange(width), first)] = -1
            row[:] = np.concatenate([row[row >= 0], row[row < 0]])
    return [guesses.astype(np.int16) for guesses in made]


def _policies(traces: Traces, rule: Rule, capacities: Sequence[int], popularity: np.ndarray) -> Callable:
    def made(places: Sequence[int]) -> Policy:
        if rule == "belady":
            return plain.Belady(plain.asked(traces, capacities, places))
        return policy(rule, traces.layers, traces.model.experts, popularity.tolist(), half_life=5)

    return made


@pytest.mark.parametrize("between", ["fresh", "kept"])
@pytest.mark.parametrize(
    ("rule", "ahead"),
    [(rule, ahead) for rule in _RULES for ahead in (0, 2, 5) if rule != "belady" or not ahead],
)
def test_hits_are_those_of_the_online_cache(made: Callable, rule: Rule, between: Between, ahead: int) -> None:
    traces = made(prompts=3)
    popularity = np.random.default_rng(3).integers(0, 6, (4, 16)).astype(float)
    predicted = _predicted(traces, ahead) if ahead else None
    for capacities in _CAPACITIES:
        expected, caches = plain.play(
            traces, capacities, _policies(traces, rule, capacities, popularity), between, predicted
        )
        found = play(traces, capacities, rule, between, predicted, popularity, half_life=5)
        for one, hits in zip(found.prompts, expected, strict=True):
            np.testing.assert_array_equal(one.hits, hits)
        online = sum(count.hits for cache in caches for count in cache.decoded)
        assert sum(int(one.hits.sum()) for one in found.prompts) == online
        assert found.first_uses == sum(count.used for cache in caches for count in cache.ahead)
        issued = sum(int(one.issued.sum()) for one in found.prompts)
        assert issued == sum(count.issued for cache in caches for count in cache.ahead)
        for cache in caches:
            cache.clear()
        assert found.wasted == sum(count.wasted for cache in caches for count in cache.ahead)
        assert issued == found.first_uses + found.wasted


def test_beladys_rule_is_a_bound_without_fetching_ahead(made: Callable) -> None:
    traces = made(prompts=1)
    with pytest.raises(UserError, match="without fetching ahead"):
        play(traces, (4,) * 4, "belady", "fresh", _predicted(traces, 2))


def test_what_this_step_used_is_told_by_its_place_in_the_order_of_issue(made: Callable) -> None:
    traces = made(prompts=1)
    predicted = _predicted(traces, 4)
    found = play(traces, (4, 4, 4, 4), "lru", "fresh", predicted).prompts[0]
    assert (found.used.sum(axis=-1) <= found.issued).all()
    assert (found.used.sum(axis=-1) <= found.hits).all()
    places = np.arange(4) < found.issued[..., None]
    assert not (found.used & ~places).any()


def _fewest_misses(steps: Sequence[frozenset[int]], capacity: int) -> int:
    """By trying everything: the fewest fills with which every step's experts are resident together."""
    reached = {frozenset[int](): 0}
    for step in steps:
        following: dict[frozenset[int], int] = {}
        for resident, misses in reached.items():
            needed = misses + len(step - resident)
            keepable = resident - step
            for size in range(min(len(keepable), capacity - len(step)) + 1):
                for kept in itertools.combinations(sorted(keepable), size):
                    after = step | frozenset(kept)
                    following[after] = min(following.get(after, needed), needed)
        reached = following
    return min(reached.values())


@pytest.mark.parametrize("seed", range(12))
def test_beladys_rule_has_the_fewest_misses_there_can_be(made: Callable, seed: int) -> None:
    traces = made(prompts=1, steps=12, layers=2, experts=6, k=2, prefill=1, seed=seed)
    for capacity in (2, 3, 4):
        found = play(traces, (capacity, capacity), "belady").prompts[0]
        for layer in range(2):
            steps = [frozenset(row) for row in traces.prompts[0].experts[:, layer].tolist()]
            fewest = _fewest_misses(steps, capacity)
            assert found.misses[:, layer].sum() + len(steps[0]) == fewest
            for rule in ("lru", "lfu"):
                other = play(traces, (capacity, capacity), rule).prompts[0]
                assert other.misses[:, layer].sum() >= found.misses[:, layer].sum()


def test_a_layer_with_room_for_all_hits_from_the_first_token_on(made: Callable) -> None:
    traces = made(prompts=2)
    found = play(traces, (16, 3, 16, 16), "lru")
    for one in found.prompts:
        assert not one.misses[:, [0, 2, 3]].any()
        assert one.misses[:, 1].any()


def test_residents_that_are_kept_help_the_next_prompt(made: Callable) -> None:
    traces = made(prompts=4, prefill=1, steps=3)
    one, kept = play(traces, (12,) * 4, "lru", "fresh"), play(traces, (12,) * 4, "lru", "kept")
    assert sum(p.hits.sum() for p in kept.prompts[1:]) > sum(p.hits.sum() for p in one.prompts[1:])
    np.testing.assert_array_equal(one.prompts[0].hits, kept.prompts[0].hits)


def test_prompts_of_different_lengths_share_an_array_and_nothing_else(made: Callable) -> None:
    long, short = made(prompts=1, steps=20), made(prompts=1, steps=6, seed=5)
    both = Traces(long.model, long.sampling, (*long.prompts, *_renamed(short)))
    found = play(both, (5,) * 4, "lfu-decay")
    np.testing.assert_array_equal(found.prompts[0].hits, play(long, (5,) * 4, "lfu-decay").prompts[0].hits)
    np.testing.assert_array_equal(found.prompts[1].hits, play(short, (5,) * 4, "lfu-decay").prompts[0].hits)


def _renamed(traces: Traces) -> list:
    from dataclasses import replace

    return [replace(one, name=f"other-{one.name}") for one in traces.prompts]
