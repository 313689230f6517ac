"""Cells under the names that a run directory's records have for them, which may be of an older version of the workload."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from coresident.lab.records.schema import CellRef, Record
from coresident.lab.study.cells import Cell, canonical, cell_hash
from coresident.workload import Workload


def as_recorded(
    cells: Iterable[Cell], records: Iterable[Record], workload: Workload, controls: Sequence[str]
) -> tuple[Cell, ...]:
    """The cells; one that was measured before the workload got its newest parameters is the one that was measured then.

    So it is where today's defaults of these parameters make it the cell that is asked for: what a workload did before it had
    a parameter, it does by that parameter's default.
    """
    recorded = {record.cell.id: record.cell for record in records}
    return tuple(
        cell if cell.id in recorded else _older(cell, recorded.values(), workload, controls) for cell in cells
    )


def _older(cell: Cell, recorded: Iterable[CellRef], workload: Workload, controls: Sequence[str]) -> Cell:
    for one in recorded:
        if (
            (one.workload, one.arm) == (cell.workload, cell.arm)
            and canonical(one.factors) == canonical(dict(cell.factors))
            and canonical(_completed(one.parameters, workload)) == canonical(dict(cell.parameters))
            # Else it was measured under other controls.
            and cell_hash(one.workload, one.arm, one.factors, one.parameters, controls) == one.hash
        ):
            return replace(cell, id=one.id, parameters=one.parameters, hash=one.hash)
    return cell


def _completed(parameters: dict[str, Any], workload: Workload) -> Any:
    try:
        found = workload.parameters.model_validate_json(canonical(parameters))
    except ValidationError:
        # It has parameters that the workload no longer has.
        return None
    return found.model_dump(mode="json", by_alias=True)
