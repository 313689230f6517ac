"""Numbers, limits and levels in words, the same wherever a verdict or a table of medians is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from coresident.lab.study.schema import Level
from coresident.lab.verdict.model import State


def number(value: float, decimals: int | None = None) -> str:
    """A number for reading: four significant digits, or the given decimals.

    >>> number(1234.56), number(0.012345), number(3.0), number(1.02, 3)
    ('1235', '0.01235', '3', '1.020')
    """
    if decimals is not None and 1e-4 <= abs(value) < 1e9:
        text = f"{value:.{decimals}f}"
        # A number that is small beside its interval is still not zero.
        return text if float(text) != 0 else f"{value:.2g}"
    if 1000 <= abs(value) < 1e9:
        return f"{value:.0f}"
    return f"{value:.4g}"


def interval(
    estimate: float, low: float, high: float, limits: tuple[float, float] | None = None
) -> tuple[str, str]:
    """The estimate and "[low, high]", with decimals to suit the width.

    Decimals are added where rounding would move an end onto a limit that it does not touch.

    >>> interval(1.02134, 1.01101, 1.03167, (0.95, math.inf))
    ('1.021', '[1.011, 1.032]')
    """
    width = high - low
    decimals = 6 if width <= 0 else min(9, max(0, 1 - math.floor(math.log10(width))))
    while decimals < 9 and any(
        end != limit and math.isfinite(limit) and number(end, decimals) == number(limit, decimals)
        for end in (low, high)
        for limit in limits or ()
    ):
        decimals += 1
    if width <= 0:
        return number(estimate), f"[{number(low)}, {number(high)}]"
    return number(estimate, decimals), f"[{number(low, decimals)}, {number(high, decimals)}]"


def unit(name: str) -> str:
    """A unit as it stands after a number: shares and counts, whose unit is 1, have none.

    >>> unit("ms"), unit("1")
    ('ms', '')
    """
    return "" if name == "1" else name


def limits(low: float, high: float) -> str:
    """The range in which a claim is true.

    >>> limits(0.95, math.inf), limits(-math.inf, 2.0), limits(0.9, 1.1)
    ('at least 0.95', 'at most 2', 'within 0.9 to 1.1')
    """
    if math.isinf(high):
        return f"at least {low:g}"
    if math.isinf(low):
        return f"at most {high:g}"
    return f"within {low:g} to {high:g}"


def position(state: State, ends: str, asked: tuple[float, float]) -> str:
    """Where an interval, written as `ends`, lies relative to a claim's limits."""
    part = {State.SUPPORTED: "all", State.REFUTED: "none"}.get(state, "only a part")
    return f"{part} of {ends} is {limits(*asked)}"


def level(value: Level) -> str:
    """A factor's level as the study file writes it."""
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def levels(at: Mapping[str, Level]) -> str:
    """A point of the factors; "" where there are none.

    >>> levels({"learners": 8, "packed": True})
    'learners=8, packed=true'
    """
    return ", ".join(f"{factor}={level(value)}" for factor, value in at.items())


def plain(value: Any) -> str:
    """What a control asked for or found, for reading: no brackets but round ones, and what is alike is said once.

    >>> plain({"lock": "held", "clean": True, "pids": [7, 9], "seen": None})
    'lock held, clean true, pids (7, 9), seen -'
    >>> plain([{"mib": 141.04}, {"mib": 141.04}, {"mib": 8.0}])
    '2 x (mib 141.04), (mib 8)'
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_enclosed(inner)}" for key, inner in value.items()) or "-"
    if isinstance(value, Sequence) and not isinstance(value, str):
        runs = [(text, len(list(alike))) for text, alike in groupby(map(_enclosed, value))]
        return ", ".join(text if times == 1 else f"{times} x {text}" for text, times in runs) or "-"
    if value is None or value == "":
        return "-"
    return level(value) if not isinstance(value, float) else f"{value:.6g}"


def _enclosed(value: Any) -> str:
    inner = plain(value)
    return f"({inner})" if isinstance(value, Mapping | list | tuple) and inner != "-" else inner


def brief(text: str, most: int = 24) -> str:
    """A text of at most so many characters; hashes need no more to be told apart.

    >>> brief("a" * 40, 8)
    'aaaaaaa…'
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"


def changed(differing: Iterable[tuple[str, str, str]]) -> str:
    """What differs between two conditions: (key, value then, value now), "" where it was absent.

    >>> changed([("driver", "550", "560"), ("OMP_NUM_THREADS", "", "2")])
    'driver: 550 -> 560, OMP_NUM_THREADS: absent -> 2'
    """
    return listed(
        f"{key}: {brief(then) or 'absent'} -> {brief(now) or 'absent'}" for key, then, now in differing
    )


def count(number: int, singular: str, plural: str | None = None) -> str:
    """A count with its noun.

    >>> count(1, "pair"), count(2, "pair")
    ('1 pair', '2 pairs')
    """
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def listed(items: Iterable[str], most: int = 3, separator: str = ", ") -> str:
    """The first few of a list.

    >>> listed(["a", "b", "c", "d"], most=2)
    'a, b and 2 more'
    """
    items = list(items)
    if len(items) <= most:
        return separator.join(items)
    return f"{separator.join(items[:most])} and {len(items) - most} more"
