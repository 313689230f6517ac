"""Sharing on a card is decided by where the base lies and by what the whole card says, in both directions."""

from __future__ import annotations

import pytest

from coresident.engines.pool.sharing.device_sharing import DeviceHeld, DeviceUse, decide, shown

GIB = 1 << 30
BASE = 3 * GIB


def learner(shared: bool, base: int = BASE, own: float = 1.2) -> DeviceHeld:
    private = 0 if shared else base
    reserved = private + int(own * GIB)
    return DeviceHeld(base, private, base - private, reserved, reserved)


def card(each: float, learners: int = 8) -> DeviceUse:
    """A card on which a learner adds `each` GiB."""
    without = 4 * GIB
    barrier = without + int(learners * each * GIB)
    return DeviceUse(GIB, barrier, without, barrier, learners)


@pytest.mark.parametrize(
    ("asked", "shared", "each"), [("fork", True, 1.7), ("none", False, 4.7), ("fork-copy", False, 4.7)]
)
def test_what_was_asked_and_ran_passes(asked: str, shared: bool, each: float) -> None:
    assert decide(asked, [learner(shared)] * 8, card(each)).passed is True


@pytest.mark.parametrize(
    ("asked", "shared", "said"),
    [
        ("fork", False, "learner 0 had a private copy of 100.0 % of the base"),
        ("none", True, "learner 0 shared 100.0 % of a base that was to be its own"),
        ("fork-copy", True, "learner 0 shared 100.0 % of a base that was to be its own"),
    ],
)
@pytest.mark.parametrize("base", [BASE, 1 << 20])
def test_where_the_base_lies_decides_for_bases_of_every_size(
    asked: str, shared: bool, said: str, base: int
) -> None:
    ruling = decide(asked, [learner(shared, base)] * 2, card(1.7))
    assert (ruling.passed, ruling.reason) == (False, said)


def test_a_mapping_behind_which_the_card_holds_copies_is_no_sharing() -> None:
    ruling = decide("fork", [learner(True)] * 8, card(4.7))
    assert ruling.passed is False
    assert "a learner adds 4813 MiB to the card and its allocator holds 1229" in ruling.reason


def test_copies_that_the_card_does_not_show_are_no_copies() -> None:
    ruling = decide("none", [learner(False)] * 8, card(1.7))
    assert ruling.passed is False
    assert "less than a base of its own (3072 MiB)" in ruling.reason


def test_an_unread_card_decides_nothing() -> None:
    assert decide("fork", [learner(True)], None).passed is None


def test_the_figures_are_shown() -> None:
    figures = shown([learner(True)], card(1.5))
    assert figures["card"]["marginal_mib"] == 1536.0
    assert figures["learners"][0]["mapped_mib"] == 3072.0
