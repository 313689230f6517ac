"""The unigram model's loss, worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coresident.text import unigram


def test_it_is_the_cross_entropy_of_validation_targets_under_training_counts(
    cache_of: Callable[..., Any],
) -> None:
    cache = cache_of(
        {
            ("train", "code"): np.array([1, 1, 1]),
            ("train", "prose"): np.array([2]),
            ("validation", "code"): np.array([1, 1, 2]),
            ("validation", "prose"): np.array([2, 3]),
        },
        shard_tokens=2,
    )
    total = 4 + (1 << 16)
    one, two, three = (-math.log(count / total) for count in (4, 2, 1))
    # Of five tokens four are targets: the first 1 has none before it.
    assert unigram.cross_entropy(cache) == pytest.approx((one + two + two + three) / 4)
    assert unigram.cross_entropy(cache, "prose") == pytest.approx(three)
    assert unigram.counts(cache, "train")[1] == 3
