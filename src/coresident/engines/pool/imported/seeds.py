"""Whether equal seeds ended at equal losses, over all results of one directory.

Learner K trains on the shard of seed 100 + K with trainer seed 42, whatever the arm and however many learners there are. So
where steps, batch, length, card, driver and torch are equal, learner K's losses must be. Where they are not, nothing says
which result is right: the control fails in all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from coresident.engines.pool.imported.published import Published
from coresident.importing import ImportedControl

NAME, ASKED = "equal-seeds", "one loss for one seed"
# What must be equal before losses must be.
CONDITIONS = ("gpu", "driver", "torch")


def compare(results: Mapping[str, Published]) -> dict[str, ImportedControl]:
    """The control `equal-seeds` of each result (by name)."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, result in results.items():
        groups.setdefault(_group(result), []).append(name)
    return {name: _control(name, groups[_group(result)], results) for name, result in results.items()}


def _group(result: Published) -> tuple[Any, ...]:
    told = tuple(str(result.env.get(name)) for name in CONDITIONS)
    return (result.steps, result.batch, result.maxseq, *told)


def _control(name: str, group: list[str], results: Mapping[str, Published]) -> ImportedControl:
    own = _losses(results[name])
    compared: set[str] = set()
    differing: dict[str, dict[str, list[float]]] = {}
    for other in group:
        if other == name:
            continue
        theirs = _losses(results[other])
        for lid in own.keys() & theirs.keys():
            compared.add(lid)
            if own[lid] != theirs[lid]:
                differing.setdefault(f"learner {lid}", {name: list(own[lid])})[other] = list(theirs[lid])
    ran = {"learners compared": len(compared), "differing": differing}
    if not compared:
        return ImportedControl(
            NAME, ASKED, ran, None, "no other result has a learner of the same seed and settings"
        )
    if not differing:
        return ImportedControl(NAME, ASKED, ran, True)
    learner = min(differing, key=lambda said: int(said.split()[-1]))
    here = differing[learner][name]
    other, there = next((one, loss) for one, loss in differing[learner].items() if one != name)
    place = int(here[1] != there[1])
    what = ("started", "ended")[place]
    more = f" ({len(differing)} of {len(compared)} learners differ)"
    reason = (
        f"{learner} {what} at {here[place]:g} here and at {there[place]:g} in {other}, with one seed{more}"
    )
    return ImportedControl(NAME, ASKED, ran, False, reason)


def _losses(result: Published) -> dict[str, tuple[float, float]]:
    """First and last loss by learner's number, of those that have finite ones: others are told of elsewhere."""
    return {
        one.lid: (float(one.loss0 or 0.0), float(one.lossN or 0.0))
        for one in result.learners
        if one.finite and re.fullmatch(r"[0-9]{1,9}", one.lid)
    }
