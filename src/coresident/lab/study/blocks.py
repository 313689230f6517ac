"""Blocks: which cells are measured close together in time, because they are compared, and in which order.

A comparison is only as good as what its two sides share. One block is one repetition of all cells that are
compared with each other; drift that is slow against a block then touches both sides alike, and what is left
of it is turned round by running every second block backwards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from coresident.lab.study.cells import Cell, canonical, digest, matches
from coresident.lab.study.schema import Study


@dataclass(frozen=True)
class Group:
    """Cells that are compared with one another, in the study's order; a repetition of them is a block."""

    id: str
    cells: tuple[Cell, ...]


def groups(study: Study, cells: Sequence[Cell]) -> list[Group]:
    """Cells with the same factor values, joined further where a hypothesis takes a slope across a factor."""
    parent = list(range(len(cells)))

    def root(at: int) -> int:
        while parent[at] != at:
            at = parent[at]
        return at

    first: dict[str, int] = {}
    for at, cell in enumerate(cells):
        for link in (_point(cell), *_slopes(study, cell)):
            parent[root(at)] = root(first.setdefault(link, at))
    members: dict[int, list[Cell]] = {}
    for at, cell in enumerate(cells):
        members.setdefault(root(at), []).append(cell)
    return [Group(id=_name(joined), cells=tuple(joined)) for joined in members.values()]


def order(group: Group, repetition: int, seed: int) -> list[Cell]:
    """The order in which one block measures its cells.

    Factor points and arms start from a seeded shuffle. Each odd repetition runs its predecessor's order
    backwards, so that over the two of them every cell has the same mean position and a linear drift
    cancels; points are shuffled anew for each such couple. Neither depends on which other arms or levels
    there are.
    """
    couple = repetition // 2

    def shuffled(cell: Cell) -> tuple[str, str]:
        point = _point(cell)
        return digest([seed, couple, point]), digest([seed, point, cell.arm])

    ordered = sorted(group.cells, key=shuffled)
    return ordered if repetition % 2 == 0 else ordered[::-1]


def _point(cell: Cell) -> str:
    return canonical(dict(cell.factors))


def _slopes(study: Study, cell: Cell) -> list[str]:
    """A key for each hypothesis whose slope runs through this cell: equal for all cells that the slope is
    fitted to.
    """
    links = []
    for name, hypothesis in study.hypotheses.items():
        compare = hypothesis.compare
        if (
            compare.slope is None
            or cell.arm not in (compare.arm, compare.to)
            or not matches(cell, hypothesis)
        ):
            continue
        others = {factor: level for factor, level in cell.factors.items() if factor != compare.slope}
        links.append(canonical(["slope", name, others]))
    return links


def _name(cells: Sequence[Cell]) -> str:
    """Readable and distinct: the levels that occur, and a digest of the exact points."""
    levels: dict[str, list[str]] = {}
    for cell in cells:
        for factor, level in cell.factors.items():
            text = canonical(level).strip('"')
            if text not in levels.setdefault(factor, []):
                levels[factor].append(text)
    if not levels:
        return "all"
    readable = "-".join(f"{factor}-{'+'.join(found)}" for factor, found in levels.items())
    points = digest(sorted({_point(cell) for cell in cells}))
    return f"{re.sub(r'[^A-Za-z0-9._+-]+', '_', readable)[:80]}-{points[:8]}"
