"""The watch over a card's memory: the peak counts, a budget ends the run, and what cannot fit is said before."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from coresident.engines.pool.card.card import Memory, Watch, reader, require_free
from coresident.errors import MachineError

GIB = 1 << 30


def card(used: Iterable[float], total: float = 140) -> Callable[[], Memory]:
    """A stand-in for the driver's answers: GiB in use, one after another."""
    told = iter(used)
    return lambda: Memory(int(total * GIB), int(next(told) * GIB))


def test_the_highest_figure_is_kept_and_the_idle_one_is_the_first() -> None:
    watch = Watch(card([1, 5, 3]))
    assert [watch.used(), watch.used()] == [5 * GIB, 3 * GIB]
    assert (watch.idle, watch.peak) == (GIB, 5 * GIB)


def test_a_peak_above_the_budget_is_out_of_memory_with_the_figure() -> None:
    watch = Watch(card([1, 80, 80.5]), budget=80 * GIB)
    assert watch.used() == 80 * GIB
    with pytest.raises(
        MemoryError, match=r"reached 80\.50 GiB, above the budget device_memory of 80\.00 GiB"
    ):
        watch.used()


def test_looking_again_at_once_asks_nothing() -> None:
    watch = Watch(card([1, 2]), interval=3600)
    watch.look()
    watch.look()
    assert watch.peak == 2 * GIB


def test_what_is_missing_is_said() -> None:
    require_free(Memory(140 * GIB, 10 * GIB), None, 130 * GIB)
    with pytest.raises(
        MemoryError, match=r"at least 131\.00 GiB .* 130\.00 GiB is free on the card: 1\.00 GiB is"
    ):
        require_free(Memory(140 * GIB, 10 * GIB), None, 131 * GIB)


def test_a_budget_counts_what_others_use() -> None:
    with pytest.raises(MemoryError, match=r"70\.00 GiB is left of device_memory: 5\.00 GiB is missing"):
        require_free(Memory(140 * GIB, 10 * GIB), 80 * GIB, 75 * GIB)


def test_a_card_that_is_not_there_is_named_with_a_remedy() -> None:
    with pytest.raises(MachineError, match="no CUDA device GPU-none") as caught:
        reader("GPU-none")
    assert "nvidia-smi" in caught.value.remedy
