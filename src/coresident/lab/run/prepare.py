"""Checks all of a study against this machine before anything is written: names, values, inputs, cores, memory, device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coresident.errors import UserError, located
from coresident.lab.records.known import as_recorded
from coresident.lab.records.schema import Record
from coresident.lab.run import preflight
from coresident.lab.run.machine.cores import assign
from coresident.lab.run.machine.devices import Device, resolve
from coresident.lab.study.cells import Cell, canonical, expand
from coresident.lab.study.check import check
from coresident.lab.study.load import Loaded
from coresident.lab.study.schema import Study
from coresident.workload import Needs, Parameters, Workload, workload


@dataclass(frozen=True)
class Prepared:
    """A study that was checked on this machine: it can be run."""

    loaded: Loaded
    workload: Workload
    cells: tuple[Cell, ...]
    needs: dict[str, Needs]
    cores: dict[str, list[list[int]]]
    devices: tuple[Device, ...]

    @property
    def study(self) -> Study:
        return self.loaded.study

    def parameters(self, cell: Cell) -> Parameters:
        """A cell's parameters as the workload's own model."""
        return self.workload.parameters.model_validate_json(canonical(dict(cell.parameters)))


def expanded(loaded: Loaded, records: Sequence[Record] = ()) -> tuple[Workload, tuple[Cell, ...]]:
    """The study's workload and cells, as `records` of it name them, with every name checked; nothing of the machine is asked."""
    with located(loaded.source.where(("workload",))):
        chosen = workload(loaded.study.workload)
    cells = as_recorded(expand(loaded.study, chosen, loaded.source), records, chosen, loaded.study.controls)
    check(loaded.study, chosen, cells, loaded.source)
    return chosen, cells


def prepare(loaded: Loaded, devices: str, records: Sequence[Record] = ()) -> Prepared:
    """Everything that can be checked without running or writing. `records` are those of the run that it goes on with."""
    chosen, cells = expanded(loaded, records)
    found = resolve(devices)
    if loaded.study.device == "card" and any(device.kind == "cpu" for device in found):
        with located(loaded.source.where(("device",))):
            raise UserError(
                f"{loaded.study.study} asks about a card, and this would run on {found[0].name}",
                "measure it on a machine with a card (--devices 0)",
            )
    prepared = Prepared(loaded, chosen, cells, {}, {}, tuple(found))
    for cell in cells:
        with located(f"{loaded.origin}: cell {cell.id}"):
            needs = chosen.inspect(prepared.parameters(cell))
            prepared.cores[cell.id] = assign(needs)
            preflight.memory(needs, card=all(device.kind == "cuda" for device in found))
        prepared.needs[cell.id] = needs
    return prepared
