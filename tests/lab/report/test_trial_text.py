"""The sentence that `coresident try` ends with: two-sided, plain, and never more than was shown."""

from __future__ import annotations

from typing import Any

import pytest

from coresident.lab.report.trial_text import sentence

CLAIM = {
    "claim": "B takes less",
    "metric": "speed",
    "compare": {"arm": "fork", "to": "native"},
    "expect": {"ratio": {"at_most": 1.0}},
}


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([1.21, 1.21, 1.21], "B takes 21 % more wall_seconds than A (21 % to 21 %)"),
        ([0.79, 0.79, 0.79], "B takes 21 % less wall_seconds than A (21 % to 21 %)"),
        ([14.0, 14.0, 14.0], "B takes 14 times the wall_seconds of A (14 to 14 times)"),
        (
            [1.0, 1.0, 1.0],
            "no difference shown: B takes between 0.2 % less and 0.2 % more wall_seconds than A",
        ),
        ([0.001, 0.001, 0.001], "B takes 99.9 % less wall_seconds than A (99.9 % to 99.9 %)"),
        ([2.0, 2.0], "no difference can be told: 2 pairs of the 3 needed"),
    ],
)
def test_each_side_and_none(lab: Any, ratios: list[float], said: str) -> None:
    assert sentence(lab({"H1": CLAIM}).pairs(ratios).verdict(), "wall_seconds") == said


def test_the_ends_stand_in_the_order_of_their_size(lab: Any) -> None:
    text = sentence(lab({"H1": CLAIM}).pairs([0.5, 0.52, 0.48]).verdict(), "seconds")
    assert text == "B takes 50 % less seconds than A (41 % to 58 %)"
