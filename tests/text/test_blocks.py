"""Windows: each token but the first is a target once, whatever the lengths, and shards are no borders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coresident.errors import UserError
from coresident.text.blocks import IGNORED, Blocks

MakeCache = Callable[..., Any]


def _blocks(cache_of: MakeCache, count: int, context: int, shard_tokens: int = 1 << 20) -> Blocks:
    cache = cache_of({("train", "code"): np.arange(count)}, shard_tokens)
    return Blocks(cache.tokens("train"), context)


def test_windows_overlap_by_one_token_and_the_last_one_is_as_short_as_the_text(cache_of: MakeCache) -> None:
    blocks = _blocks(cache_of, 11, 4)
    found = blocks.windows(blocks.evenly())
    assert found.tokens[:, :4].tolist() == found.inputs().tolist()
    assert found.inputs().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 0]]
    assert found.targets().tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, IGNORED, IGNORED]]
    assert found.lengths.tolist() == [4, 4, 2]
    assert found.valid == blocks.targets == 10


@pytest.mark.parametrize("count", [2, 4, 5, 6, 9])
def test_no_window_is_empty_where_the_text_ends_with_one(cache_of: MakeCache, count: int) -> None:
    blocks = _blocks(cache_of, count, 4)
    assert blocks.lengths(blocks.evenly()).min() >= 1
    assert blocks.lengths(blocks.evenly()).sum() == count - 1


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(count=st.integers(2, 300), context=st.integers(1, 40), shard=st.integers(1, 100))
def test_every_token_but_the_first_is_a_target_once(
    cache_of: MakeCache, count: int, context: int, shard: int
) -> None:
    blocks = _blocks(cache_of, count, context, shard)
    targets = blocks.windows(blocks.evenly()).targets()
    assert targets[targets != IGNORED].tolist() == list(range(1, count))


def test_a_subset_is_spread_evenly_and_in_the_order_of_the_text(cache_of: MakeCache) -> None:
    blocks = _blocks(cache_of, 101, 10)
    assert blocks.evenly(5).tolist() == [0, 2, 4, 6, 8]
    assert blocks.evenly(1000).tolist() == blocks.evenly().tolist() == list(range(len(blocks)))
    assert blocks.windows(blocks.evenly(5)).tokens[:, 0].tolist() == [0, 20, 40, 60, 80]


def test_families_follow_one_another_and_can_be_read_alone(cache_of: MakeCache) -> None:
    cache = cache_of({("train", "code"): np.arange(5), ("train", "prose"): np.arange(100, 103)})
    assert cache.tokens("train").read(0, 99).tolist() == [0, 1, 2, 3, 4, 100, 101, 102]
    assert cache.tokens("train", "prose").read(1, 99).tolist() == [101, 102]
    with pytest.raises(UserError, match="no family 'proze'; did you mean 'prose'"):
        cache.tokens("train", "proze")


def test_one_token_has_no_target_and_a_context_of_none_neither(cache_of: MakeCache) -> None:
    with pytest.raises(UserError, match="1 tokens here, and a target needs a token before it"):
        _blocks(cache_of, 1, 4)
    with pytest.raises(UserError, match="a context of 0 tokens"):
        _blocks(cache_of, 9, 0)
