"""A hypothesis taken apart: at which points of the factors it is judged, and between which cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coresident.errors import UserError
from coresident.lab.study.cells import Cell, canonical, matches
from coresident.lab.study.schema import Hypothesis, Level


@dataclass(frozen=True)
class Point:
    """One comparison: the cells of `arm` and, where the claim has a `to`, its cells in the same order.

    A single cell a side; with a slope, one for each of `levels`, the factor's values in ascending order.
    """

    at: Mapping[str, Level]
    arm: tuple[Cell, ...]
    to: tuple[Cell, ...]
    levels: tuple[float, ...] = ()


def points(name: str, hypothesis: Hypothesis, cells: Sequence[Cell]) -> list[Point]:
    """Every point that hypothesis `name` is judged at, in the order of `cells`.

    Raises `UserError` where a slope is asked over a factor that has no two numbers.
    """
    compare = hypothesis.compare
    over = compare.slope
    grouped: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.arm == compare.arm and matches(cell, hypothesis):
            grouped.setdefault(canonical(_without(cell.factors, over)), []).append(cell)
    partners = {canonical(dict(cell.factors)): cell for cell in cells if cell.arm == compare.to}
    found = []
    for members in grouped.values():
        levels = _numbers(name, over, members) if over is not None else ()
        if over is not None:
            members = [members[index] for index in sorted(range(len(levels)), key=levels.__getitem__)]
        to = [partners[canonical(dict(cell.factors))] for cell in members] if compare.to is not None else []
        at = _without(members[0].factors, over)
        found.append(Point(at, tuple(members), tuple(to), tuple(sorted(levels))))
    return found


def about(hypothesis: Hypothesis) -> str:
    """What is compared, in words."""
    compare, expect = hypothesis.compare, hypothesis.expect
    between = "-" if expect.difference is not None else "/"
    arms = compare.arm if compare.to is None else f"{compare.arm} {between} {compare.to}"
    if expect.same:
        return f"series and digests of {compare.arm} and {compare.to}"
    if expect.status is not None:
        return f"share of {compare.arm} that ends {expect.status.is_}"
    if compare.slope is not None:
        return f"{hypothesis.metric} per {compare.slope}, {arms}"
    return f"{hypothesis.metric}, {arms}"


def _numbers(name: str, factor: str, cells: Sequence[Cell]) -> tuple[float, ...]:
    levels = [cell.factors.get(factor) for cell in cells]
    numbers = [float(v) for v in levels if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(levels) or len(set(numbers)) < 2:
        raise UserError(
            f"hypotheses.{name}.compare.slope: factor {factor!r} has no two numbers to fit a slope over",
            "name a factor with at least two numeric levels",
        )
    return tuple(numbers)


def _without(factors: Mapping[str, Level], over: str | None) -> dict[str, Level]:
    return {factor: level for factor, level in factors.items() if factor != over}
