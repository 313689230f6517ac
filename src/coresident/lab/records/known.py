"""Cells under the names that a run directory's records have for them, which may be of an older version of the workload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from coresident.lab.records.schema import CellRef, Record
from coresident.lab.study.cells import Cell, canonical, cell_hash
from coresident.workload import Workload

# What was asked under one name: more than one thing where a later version of the workload told its newer parameters too.
_Asked = list[CellRef]


def as_recorded(
    cells: Iterable[Cell], records: Iterable[Record], workload: Workload, controls: Sequence[str]
) -> tuple[Cell, ...]:
    """The cells; one that was measured before the workload got its newest parameters has the name of what was measured then.

    So it is where today's defaults of these parameters make it the cell that is asked for: what a workload did before it had
    a parameter, it does by that parameter's default. What was measured since tells the parameter, so that a default that
    changes later makes another cell.
    """
    recorded: dict[str, _Asked] = {}
    for record in records:
        asked = recorded.setdefault(record.cell.id, [])
        if record.cell not in asked:
            asked.append(record.cell)
    points: dict[str, list[_Asked]] = {}
    for asked in recorded.values():
        points.setdefault(_point(asked[0]), []).append(asked)
    return tuple(
        cell if cell.id in recorded else _older(cell, points.get(_point(cell), ()), workload, controls)
        for cell in cells
    )


def _point(cell: Cell | CellRef) -> str:
    return canonical([cell.workload, cell.arm, dict(cell.factors)])


def _older(cell: Cell, names: Iterable[_Asked], workload: Workload, controls: Sequence[str]) -> Cell:
    wanted = canonical(dict(cell.parameters))
    for asked in names:
        # Else it was measured under other controls.
        ours = any(
            cell_hash(one.workload, one.arm, one.factors, one.parameters, controls) == one.hash
            for one in asked
        )
        if ours and all(canonical(_completed(one.parameters, workload)) == wanted for one in asked):
            return replace(cell, id=asked[0].id, hash=asked[0].hash)
    return cell


def _completed(parameters: Mapping[str, Any], workload: Workload) -> Any:
    try:
        found = workload.parameters.model_validate_json(canonical(parameters))
    except ValidationError:
        # It has parameters that the workload no longer has.
        return None
    return found.model_dump(mode="json", by_alias=True)
