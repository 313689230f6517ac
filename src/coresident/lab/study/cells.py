"""Cells: every combination of an arm and factor levels, with the parameters it asks for and a hash of all
that is asked.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from coresident.errors import InternalError, UserError
from coresident.lab.study.explain import explain
from coresident.lab.study.schema import Hypothesis, Level, Study
from coresident.lab.study.source import NOTHING, Path, Source, below
from coresident.workload import Workload


@dataclass(frozen=True)
class Cell:
    """One point of a study: what was asked, all of it.

    `parameters` are complete (defaults filled in), JSON-ready. `hash` covers workload, arm, factors,
    parameters and controls; `id` is a readable name that ends in the hash's first eight digits and serves
    as file name.
    """

    id: str
    workload: str
    arm: str
    factors: Mapping[str, Level]
    parameters: Mapping[str, Any]
    hash: str


def canonical(value: Any) -> str:
    """One text for one JSON value: keys sorted, no spaces, no NaN. What hashes are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 (hex) of a JSON value's canonical text."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def same_level(one: Level, other: Level) -> bool:
    """Equal as levels: 1 is 1.0, but true is not 1 and "1" is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def matches(cell: Cell, hypothesis: Hypothesis) -> bool:
    """Whether a cell's factors are those that the hypothesis is stated `at`."""
    at = hypothesis.compare.at
    return all(
        factor in cell.factors and same_level(cell.factors[factor], level) for factor, level in at.items()
    )


def expand(study: Study, workload: Workload, source: Source | None = None) -> list[Cell]:
    """All cells of a study: for each combination of factor levels, each arm, in the file's order.

    An arm is laid over `parameters` (mappings merge, anything else replaces); a factor is a dotted key of
    the parameters and is set last. Each result is checked by the workload's parameter model. A cell's hash
    depends on nothing but the cell, so adding arms or levels leaves the others as they are. Raises
    `UserError` naming arm or factor, the key and the nearest one, with its line where `source` knows it.
    """
    source = source or Source(f"study {study.study}")
    for factor, levels in study.factors.items():
        _distinct(factor, levels, source)
        for arm, changes in study.arms.items():
            if _get(changes, factor.split(".")) is not NOTHING:
                where = source.where(("arms", arm, *factor.split(".")))
                problem = f"{where}: arm {arm!r} sets {factor!r}, which is a factor"
                raise UserError(problem, "remove it from the arm or from the factors")
    cells = [
        _cell(study, workload, arm, dict(zip(study.factors, levels, strict=True)), source)
        for levels in itertools.product(*study.factors.values())
        for arm in study.arms
    ]
    if len({cell.id for cell in cells}) != len(cells):
        raise InternalError("two cells have the same id")
    return cells


def _cell(study: Study, workload: Workload, arm: str, factors: dict[str, Level], source: Source) -> Cell:
    asked = _merged(study.parameters, study.arms[arm])
    for factor, level in factors.items():
        _set(asked, factor.split("."), level, source.where(("factors", factor)))
    try:
        # By way of JSON, in which a list may stand for a tuple and 1 for 1.0 while all else stays strict.
        parameters = workload.parameters.model_validate_json(canonical(asked))
    except ValidationError as error:
        raise explain(
            error,
            workload.parameters,
            asked,
            lambda path: _blame(study, arm, factors, path, source),
        ) from None
    except ValueError:
        problem = f"{source.where(('arms', arm))}: a parameter is not a finite number"
        raise UserError(problem, "give finite numbers only") from None
    complete = parameters.model_dump(mode="json", by_alias=True)
    hashed = cell_hash(workload.name, arm, factors, complete, study.controls)
    return Cell(
        id=f"{readable(arm, factors)}-{hashed[:8]}",
        workload=workload.name,
        arm=arm,
        factors=factors,
        parameters=complete,
        hash=hashed,
    )


def cell_hash(
    workload: str,
    arm: str,
    factors: Mapping[str, Level],
    parameters: Mapping[str, Any],
    controls: Sequence[str],
) -> str:
    """The hash of all that a cell asks for."""
    return digest(
        {
            "workload": workload,
            "arm": arm,
            "factors": dict(factors),
            "parameters": dict(parameters),
            "controls": sorted(set(controls)),
        }
    )


def readable(arm: str, factors: Mapping[str, Level]) -> str:
    """A cell's name without its hash: letters, digits, dots, hyphens and underscores."""
    parts = [arm]
    for factor, level in factors.items():
        parts += [factor, str(level).lower() if isinstance(level, bool) else str(level)]
    # The name becomes a file's: file systems allow 255 bytes, and repetition and attempt are still to be
    # added.
    return re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(parts))[:120]


def _merged(base: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(dict(base))
    for key, value in above.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = _merged(old, value) if both else copy.deepcopy(value)  # type: ignore[arg-type]
    return result


def _set(parameters: dict[str, Any], path: list[str], level: Level, where: str) -> None:
    here = parameters
    for depth, part in enumerate(path[:-1], start=1):
        inner = here.get(part)
        if inner is None:
            inner = here[part] = {}
        if not isinstance(inner, dict):
            problem = f"{where}: {'.'.join(path[:depth])!r} is not a mapping, so it has no {path[depth]!r}"
            raise UserError(problem, "correct the factor's name, a dotted key of the parameters")
        here = inner
    here[path[-1]] = level


def _get(parameters: Any, path: Sequence[str | int]) -> Any:
    return functools.reduce(below, path, parameters)


def _distinct(factor: str, levels: Sequence[Level], source: Source) -> None:
    for at, level in enumerate(levels):
        for other in levels[:at]:
            if same_level(level, other):
                where = source.where(("factors", factor, at))
                raise UserError(f"{where}: level {level!r} is listed twice", "list each level once")


def _blame(study: Study, arm: str, factors: Mapping[str, Level], path: Path, source: Source) -> str:
    """Where a refused parameter was written: a factor, the arm, or the study's own parameters."""
    names: dict[Path, str] = {tuple(factor.split(".")): factor for factor in factors}
    for length in range(len(path), 0, -1):
        head = path[:length]
        if head in names:
            return source.where(("factors", names[head]))
        if _get(study.arms[arm], head) is not NOTHING:
            return source.where(("arms", arm, *path))
        if _get(study.parameters, head) is not NOTHING:
            return source.where(("parameters", *path))
    for parts, factor in names.items():
        if path and parts[: len(path)] == path:
            return source.where(("factors", factor))
    return source.where(("arms", arm))
