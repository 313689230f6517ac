"""The allocator's rules, one by one, and in a mix that leaves holes."""

from __future__ import annotations

import random
from itertools import pairwise

from coresident.engines.pool.fit.heap import MIB, Heap


def test_what_is_asked_for_is_rounded_to_512_bytes() -> None:
    heap = Heap()
    heap.take(1, "a")
    heap.take(513, "a")
    assert heap.held["a"] == 512 + 1024


def test_small_large_and_very_large_requests_come_from_segments_of_their_kind() -> None:
    heap = Heap()
    heap.take(MIB, "a")
    assert heap.reserved == 2 * MIB
    heap.take(MIB, "a")
    assert heap.reserved == 2 * MIB
    heap.take(MIB + 1, "a")
    assert heap.reserved == 22 * MIB
    heap.take(9 * MIB, "a")
    assert heap.reserved == 22 * MIB
    heap.take(17.5 * MIB, "a")
    assert heap.reserved == 40 * MIB


def test_what_is_given_back_is_used_again_and_stays_reserved() -> None:
    heap = Heap()
    for _ in range(3):
        heap.give(heap.take(30 * MIB, "a"))
    assert heap.reserved == 30 * MIB
    assert heap.held["a"] == 0


def test_the_smallest_block_that_is_large_enough_is_taken_and_split() -> None:
    heap = Heap()
    large, small = heap.take(100 * MIB, "a"), heap.take(40 * MIB, "a")
    heap.give(large, small)
    assert heap.take(30 * MIB, "b").address == small.address
    # 10 MiB of it are left, and are taken before the 100.
    assert heap.take(10 * MIB, "b").address == small.address + 30 * MIB
    assert heap.reserved == 140 * MIB


def test_a_rest_too_small_to_be_large_stays_with_its_block() -> None:
    heap = Heap()
    heap.give(heap.take(30 * MIB, "a"))
    heap.take(29.5 * MIB, "a")
    heap.take(MIB + 512, "a")
    assert heap.reserved == 50 * MIB


def test_neighbours_that_are_free_become_one() -> None:
    heap = Heap()
    parts = [heap.take(4 * MIB, "a") for _ in range(5)]
    assert heap.reserved == 20 * MIB
    for number in (1, 3, 2):
        heap.give(parts[number])
    assert heap.take(9 * MIB, "a").address == parts[1].address
    assert heap.reserved == 20 * MIB


def test_holes_make_it_reserve_more_than_is_held() -> None:
    heap = Heap()
    blocks = [heap.take(30 * MIB, "a") for _ in range(4)]
    heap.give(blocks[0], blocks[2])
    heap.take(60 * MIB, "b")
    assert heap.reserved == 180 * MIB
    assert heap.fullest == {"a": 120 * MIB} or heap.fullest == {"a": 60 * MIB, "b": 60 * MIB}


def test_no_two_blocks_overlap_whatever_is_asked() -> None:
    source = random.Random(0)
    heap = Heap()
    held = []
    for _ in range(3000):
        if held and source.random() < 0.5:
            heap.give(held.pop(source.randrange(len(held))))
        else:
            held.append(heap.take(source.choice([700, 90_000, 3 * MIB, 12 * MIB]) * source.random(), "a"))
        assert heap.held["a"] == sum(block.asked for block in held)
    spans = sorted((block.address, block.address + block.size) for block in held)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(block.asked <= block.size for block in held)
    assert spans[-1][1] <= heap.reserved
    heap.give(*held)
    assert heap.held["a"] == 0
