"""Slots from numbers and from bytes, and what is too few."""

from __future__ import annotations

import pytest

from coresident.engines.moe import budget
from coresident.engines.moe.models.architecture import named
from coresident.errors import UserError

TINY = named("tiny")
MIB = 2**20


def test_slots_between_a_token_s_experts_and_all() -> None:
    assert budget.from_slots(TINY, 2) == [2, 2, 2]
    assert budget.from_slots(TINY, 8) == [8, 8, 8]
    with pytest.raises(UserError, match="1 slots cannot hold the 2 experts that one token needs"):
        budget.from_slots(TINY, 1)
    with pytest.raises(UserError, match="9 slots a layer are more than its 8 experts"):
        budget.from_slots(TINY, 9)


def test_each_layer_may_have_its_own() -> None:
    assert budget.by_layer(TINY, (2, 8, 4)) == [2, 8, 4]
    with pytest.raises(UserError, match="given for 2 layers, and 3 have experts"):
        budget.by_layer(TINY, (2, 8))


def test_bytes_are_spent_to_the_last_slot() -> None:
    assert budget.from_bytes(TINY, 10 * MIB + 11 * MIB // 2, 10 * MIB, MIB // 2) == [4, 4, 3]
    assert budget.from_bytes(TINY, 100 * MIB, 10 * MIB, MIB) == [8, 8, 8]


def test_a_budget_below_one_token_says_what_it_needs() -> None:
    with pytest.raises(UserError, match=r"12.0 MiB is too small: .* give at least 16 MiB"):
        budget.from_bytes(TINY, 12 * MIB, 10 * MIB, MIB)


@pytest.mark.parametrize("text", ["6", "six GiB", "0GiB", "-1GiB", "6 gib"])
def test_a_size_needs_a_number_and_a_unit(text: str) -> None:
    with pytest.raises(UserError, match="is no size; write a number and a unit"):
        budget.parse_size(text, "device_memory")


def test_sizes_are_read_as_people_write_them() -> None:
    assert budget.parse_size("1.5GiB", "x") == 3 * 2**29
    assert budget.parse_size("2 MB", "x") == 2_000_000
