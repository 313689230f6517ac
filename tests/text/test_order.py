"""The order of training: decided by the seed alone, complete in each pass, and exact from any cursor on."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coresident.errors import UserError
from coresident.text.blocks import IGNORED
from coresident.text.order import Cursor, Order, permutation

MakeCache = Callable[..., Any]
CONTEXT = 4
# Ranges of eight windows each.
RANGE = 2 * CONTEXT * 8


def _order(cache_of: MakeCache, tokens: int = 211, seed: int = 7, shard_tokens: int = 50) -> Order:
    cache = cache_of({("train", "code"): np.arange(tokens)}, shard_tokens)
    return Order(cache, "train", CONTEXT, seed, range_bytes=RANGE)


def _ids(
    order: Order, count: int, size: int = 1, cursor: Cursor | None = None, prefetch: bool = True
) -> list[int]:
    found: list[int] = []
    with order.reader(cursor, prefetch) as reader:
        while len(found) < count:
            found += reader.take(min(size, count - len(found))).ids.tolist()
    return found


def test_a_pass_has_every_target_once_and_the_next_one_is_shuffled_anew(cache_of: MakeCache) -> None:
    order = _order(cache_of)
    passes: list[list[int]] = [[], [], []]
    with order.reader() as reader:
        for seen in passes:
            number = reader.cursor.passes
            while reader.cursor.passes == number:
                targets = reader.take(5).targets()
                seen += targets[targets != IGNORED].tolist()
    assert [sorted(one) for one in passes] == [list(range(1, 211))] * 3
    assert passes[0] != passes[1] != passes[2]
    assert order.targets == 210
    assert len(order) == 53


def test_a_cache_of_a_single_range_is_shuffled_anew_too(cache_of: MakeCache) -> None:
    ids = _ids(_order(cache_of, tokens=8 * CONTEXT), 16)
    assert sorted(ids[:8]) == sorted(ids[8:]) == list(range(8))
    assert ids[:8] != ids[8:]


def test_windows_carry_their_own_tokens(cache_of: MakeCache) -> None:
    for batch in itertools.islice(_order(cache_of).batches(None, 6), 20):
        assert batch.tokens[:, 0].tolist() == (batch.ids * CONTEXT).tolist()
        assert batch.lengths.tolist() == [min(CONTEXT, 210 - number * CONTEXT) for number in batch.ids]


def test_neither_prefetching_nor_batch_size_nor_shards_change_the_order(cache_of: MakeCache) -> None:
    order = _order(cache_of)
    plain = _ids(order, 160, prefetch=False)
    assert _ids(order, 160, size=1) == plain
    assert _ids(order, 160, size=13) == plain
    assert _ids(order, 160, size=100, prefetch=False) == plain
    assert _ids(_order(cache_of, shard_tokens=1 << 20), 160) == plain
    assert _ids(_order(cache_of, seed=8), 160) != plain


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(2, 400),
    stops=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    prefetch=st.booleans(),
    seed=st.integers(0, 3),
)
def test_from_any_cursor_on_it_goes_on_where_it_stopped(
    cache_of: MakeCache, tokens: int, stops: list[int], prefetch: bool, seed: int
) -> None:
    order = _order(cache_of, tokens, seed)
    whole = _ids(order, sum(stops))
    found: list[int] = []
    cursor = Cursor()
    for stop in stops:
        with order.reader(cursor, prefetch) as reader:
            left = stop
            while left:
                batch = reader.take(left)
                found += batch.ids.tolist()
                left -= len(batch)
            cursor = Cursor.model_validate_json(json.dumps(batch.cursor.model_dump()))
            assert cursor == reader.cursor
        prefetch = not prefetch
    assert found == whole


def test_the_last_batch_of_a_pass_is_as_short_as_the_pass_ends(cache_of: MakeCache) -> None:
    batches = list(itertools.islice(_order(cache_of).batches(None, 20), 4))
    assert [len(batch) for batch in batches] == [20, 20, 13, 20]
    assert [batch.cursor for batch in batches] == [
        Cursor(windows=20),
        Cursor(windows=40),
        Cursor(passes=1),
        Cursor(passes=1, windows=20),
    ]


def test_ranges_are_read_one_after_the_other_and_shuffled_within(cache_of: MakeCache) -> None:
    order = _order(cache_of, tokens=8 * 8 * CONTEXT + 1)
    ids = np.array(_ids(order, 64)).reshape(8, 8)
    ranges = ids // 8
    other = np.array(_ids(_order(cache_of, tokens=8 * 8 * CONTEXT + 1, seed=8), 64)).reshape(8, 8) // 8
    assert ranges[:, 0].tolist() != other[:, 0].tolist(), "the seed decides the order of ranges too"
    assert (ranges == ranges[:, :1]).all()
    assert ranges[:, 0].tolist() != sorted(ranges[:, 0])
    assert any(row.tolist() != sorted(row) for row in ids)


def test_the_range_that_comes_next_is_read_ahead_by_one_thread_that_ends(
    cache_of: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coresident.text.blocks import Blocks

    readers: list[str] = []
    read = Blocks.load
    monkeypatch.setattr(
        Blocks,
        "load",
        lambda self, *span: (readers.append(threading.current_thread().name), read(self, *span))[1],
    )
    order = _order(cache_of)
    with order.reader() as reader:
        for _ in range(3):
            reader.take(8)
    # The first range cannot be ahead; what the fourth one's reading has come to when we close does not matter.
    assert readers.count("MainThread") == 1
    assert sum(name.startswith("prefetch") for name in readers) >= 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_a_cursor_of_another_order_is_refused(cache_of: MakeCache) -> None:
    order = _order(cache_of)
    with pytest.raises(UserError, match="window 53 of a pass of 53"):
        order.reader(Cursor(windows=53))


def test_a_permutation_is_the_same_on_every_machine_and_for_good() -> None:
    """These very numbers: a checkpoint of today has to find its data tomorrow."""
    assert permutation(8, "7/0/ranges").tolist() == [0, 5, 4, 1, 2, 3, 7, 6]
    assert sorted(permutation(1000, "x")) == list(range(1000))
