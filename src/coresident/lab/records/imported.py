"""Records of results that others published, in a run directory that holds nothing else.

A result becomes a record as it was: what could not be read back is unverified, what failed a control is invalid, and no
aggregate takes it. Each is a block of its own, since nothing says what was measured close to what.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from coresident.errors import MachineError, UserError
from coresident.importing import Imported, ImportedControl, Importer
from coresident.lab.records.digests import series_digest
from coresident.lab.records.files import ASIDE
from coresident.lab.records.schema import (
    Block,
    CellRef,
    Conditions,
    Control,
    MetricValue,
    Record,
    Series,
    StudyRef,
)
from coresident.lab.records.store import Store
from coresident.lab.study.cells import digest, readable


def bring(importer: Importer, directory: Path, out: Path) -> list[Record]:
    """Read `directory` and write its records into the new run directory `out`, all of them or none; returns them.

    Raises `UserError` where `out` holds anything, and for what the importer cannot read.
    """
    out = out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already", "name a new directory by --out; nothing was changed")
    records = records_of(importer, importer.read(directory))
    aside = out.with_name(f"{ASIDE}{out.name}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        store = Store(aside)
        for record in records:
            store.add(record)
        aside.rename(out)
    except OSError as error:
        raise MachineError(f"{out} cannot be written: {error.strerror}", "choose another --out") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return records


def records_of(importer: Importer, results: Sequence[Imported]) -> list[Record]:
    """One record a result, in the order given; equal cells are repetitions."""
    study = StudyRef(name=f"imported-{importer.name}", fingerprint=digest(["imported", importer.name]))
    seen: dict[str, int] = {}
    records = []
    for result in results:
        cell = _cell(importer, result)
        repetition = seen.get(cell.id, 0)
        seen[cell.id] = repetition + 1
        records.append(_record(study, cell, repetition, importer, result))
    return records


def _cell(importer: Importer, result: Imported) -> CellRef:
    hashed = digest([importer.workload, importer.name, result.arm, dict(result.parameters)])
    return CellRef(
        id=f"{readable(result.arm, result.factors)}-{hashed[:8]}",
        workload=importer.workload,
        arm=result.arm,
        factors=dict(result.factors),
        parameters=dict(result.parameters),
        hash=hashed,
    )


def _record(study: StudyRef, cell: CellRef, repetition: int, importer: Importer, result: Imported) -> Record:
    values = {"imported from": importer.name, **result.conditions}
    failed = [f"{one.name}: {one.reason}" for one in result.controls if one.passed is False]
    invalid = result.status == "ok" and failed
    content = hashlib.sha256(result.file.read_bytes()).hexdigest()
    return Record(
        study=study,
        cell=cell,
        conditions=Conditions(hash=digest(values), values=values),
        block=Block(repetition=repetition, generation=0, members=[cell.id], position=0),
        attempt=1,
        status="invalid" if invalid else result.status,
        reason="; ".join(failed) if invalid else result.reason,
        started=result.started,
        duration=result.duration,
        metrics={
            name: MetricValue(value=value, unit=unit, samples=list(result.samples.get(name, ())))
            for name, (value, unit) in result.metrics.items()
        },
        series={
            name: Series(digest=series_digest(list(values)), length=len(values), values=list(values))
            for name, values in result.series.items()
        },
        controls={one.name: _control(one) for one in result.controls},
        environment={"imported": {"by": importer.name, "file": result.file.name}, **result.environment},
        artifacts={result.file.name: content},
    )


def _control(one: ImportedControl) -> Control:
    state = {True: "passed", False: "failed", None: "unverified"}[one.passed]
    return Control(asked=one.asked, ran=one.ran, state=state, reason=one.reason)  # type: ignore[arg-type]
