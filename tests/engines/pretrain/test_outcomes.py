"""Memory that ran out is seen as such, whoever says so and however it is wrapped."""

from __future__ import annotations

import pickle

import pytest
import torch

from coresident.engines.pretrain.outcomes import OutOfMemory, memory_outcome, smaller


def test_it_says_what_ran_out_and_what_to_do() -> None:
    with (
        pytest.raises(OutOfMemory, match=r"memory ran out \(CUDA out of memory\): take less"),
        memory_outcome("take less"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shape mismatch"), memory_outcome("take less"):
        raise RuntimeError("shape mismatch")


def test_who_is_nearest_says_what_to_do() -> None:
    with (
        pytest.raises(OutOfMemory, match=r"set validation\.batch to 64") as raised,
        memory_outcome(smaller("microbatch", 12, 24)),
        memory_outcome(smaller("validation.batch", 128)),
    ):
        raise MemoryError
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == str(raised.value)


@pytest.mark.parametrize(
    ("size", "whole", "said"),
    [
        (12, 24, "to 6 (it is 12)"),
        (15, 45, "to 5 (it is 15)"),
        (7, 7, "to 1 (it"),
        (1, 8, "is 1 already: take a"),
    ],
)
def test_what_takes_less_is_a_size_that_divides_the_update(size: int, whole: int, said: str) -> None:
    assert said in smaller("microbatch", size, whole)
