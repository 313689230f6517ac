"""Numbers and limits in words: enough digits, and never a rounding that contradicts the state beside it."""

from __future__ import annotations

import doctest
import math

from coresident.lab.verdict import words


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(words).failed == 0


def test_an_end_is_never_rounded_onto_a_limit_that_it_does_not_touch() -> None:
    _, ends = words.interval(1.0, 0.94996, 1.05, (0.95, math.inf))
    assert ends == "[0.94996, 1.05000]"
    _, touching = words.interval(1.0, 0.95, 1.05, (0.95, math.inf))
    assert touching == "[0.95, 1.05]"


def test_an_interval_without_width_is_not_drowned_in_digits() -> None:
    assert words.interval(4.0, 4.0, 4.0) == ("4", "[4, 4]")


def test_an_end_that_is_small_beside_its_interval_is_never_written_as_zero() -> None:
    assert words.interval(1.4, 0.00031, 57.2)[1] == "[0.00031, 57]"
    assert words.interval(1.4, -0.004, 57.2)[1] == "[-0.004, 57]"
    assert words.interval(1.4, 0.0, 57.2)[1] == "[0, 57]"
