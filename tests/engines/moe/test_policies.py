"""Which resident goes when a layer is full."""

import pytest

from coresident.engines.moe.policies import DecayingLFU, Policy, policy
from coresident.errors import InternalError, UserError


def _seen(rule: Policy, *steps: list[int]) -> Policy:
    for step in steps:
        rule.touch(0, step)
    return rule


def test_lru_gives_up_what_was_chosen_longest_ago() -> None:
    rule = _seen(policy("lru", 1, 8), [1, 2], [0, 2], [1, 3])
    assert rule.victim(0, {0, 1, 2, 3}, set()) == 0


def test_lfu_gives_up_what_was_chosen_least_often_however_recently() -> None:
    rule = _seen(policy("lfu", 1, 8), [0, 1], [0, 1], [2, 3], [2, 0])
    assert rule.victim(0, {0, 1, 2, 3}, set()) == 3


def test_lfu_remembers_an_expert_while_it_is_away() -> None:
    rule = _seen(policy("lfu", 1, 8), [5], [5], [1], [2])
    assert rule.victim(0, {1, 5}, set()) == 1


def test_decay_gives_up_an_old_habit_that_lfu_keeps() -> None:
    steps = [[0]] * 8 + [[1]] * 4
    assert _seen(policy("lfu", 1, 4), *steps).victim(0, {0, 1}, set()) == 1
    assert _seen(DecayingLFU(1, 4, half_life=2), *steps).victim(0, {0, 1}, set()) == 0


def test_static_gives_up_the_least_popular_whatever_happens() -> None:
    rule = _seen(policy("static", 1, 3, [[5.0, 1.0, 3.0]]), [1], [1])
    assert rule.victim(0, {0, 1, 2}, set()) == 1
    assert rule.victim(0, {0, 2}, set()) == 2


@pytest.mark.parametrize("name", ["lru", "lfu", "lfu-decay"])
def test_among_equals_the_lowest_id_goes(name: str) -> None:
    rule = _seen(policy(name, 1, 8), [2, 5, 7])
    assert rule.victim(0, {7, 5, 2}, set()) == 2


@pytest.mark.parametrize("name", ["lru", "lfu", "lfu-decay"])
def test_what_this_step_needs_never_goes(name: str) -> None:
    rule = _seen(policy(name, 1, 8), [1], [2], [3])
    assert rule.victim(0, {1, 2, 3}, {1}) == 2
    with pytest.raises(InternalError, match="pinned"):
        rule.victim(0, {1, 2}, {1, 2})


def test_layers_are_told_apart() -> None:
    rule = policy("lru", 2, 4)
    rule.touch(0, [0])
    rule.touch(1, [1])
    assert rule.victim(1, {0, 1}, set()) == 0


@pytest.mark.parametrize(
    ("name", "popularity", "said"),
    [
        ("lruu", None, "did you mean 'lru'"),
        ("static", None, "popularity"),
        ("static", [[1.0]], "1 layers x 4 experts"),
        ("static", [[1.0, float("nan"), 0.0, 0.0]], "no number"),
    ],
)
def test_what_is_no_policy_is_refused(name: str, popularity: list[list[float]] | None, said: str) -> None:
    with pytest.raises(UserError) as error:
        policy(name, 1, 4, popularity)
    assert said in str(error.value)


def test_a_half_life_takes_time() -> None:
    with pytest.raises(UserError, match="half-life"):
        policy("lfu-decay", 1, 4, half_life=0)
