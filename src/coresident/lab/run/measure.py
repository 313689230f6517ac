"""Measures one cell once: preflight, start, watch, read, control, leak check, record."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coresident.errors import MachineError
from coresident.lab.records.schema import (
    Block,
    CellRef,
    Conditions,
    Control,
    MetricValue,
    Record,
    StudyRef,
)
from coresident.lab.records.store import Store
from coresident.lab.run import controls, environment, preflight
from coresident.lab.run.devices import Device
from coresident.lab.run.edges import Edges
from coresident.lab.run.events import Observed, read
from coresident.lab.run.prepare import Prepared
from coresident.lab.run.status import conclude
from coresident.lab.run.stop import Stop
from coresident.lab.run.supervise import Outcome, supervise
from coresident.lab.run.telemetry import Sampler
from coresident.lab.run.watch import Watcher
from coresident.lab.study.cells import Cell, matches
from coresident.lab.study.metrics import BUILT_IN_METRICS
from coresident.workload import CELL, EVENTS, WORK, Launch

TICK = 0.02
LARGEST_ARTIFACT = 256 * 2**20


class Dirty(Exception):  # noqa: N818 - the cell is recorded; it is the device that is in no state to go on
    """The device was left dirty by a cell: nothing more can be measured on it now."""


class Bench:
    """Where cells are measured: everything that stays the same from cell to cell of one run."""

    def __init__(
        self,
        prepared: Prepared,
        out: Path,
        fingerprint: str,
        watch: Watcher,
        stop: Stop,
        store: Store,
        edges: Edges,
    ) -> None:
        self.prepared, self.watch, self.stop, self.store = prepared, watch, stop, store
        self.edges = edges
        self.out = out.resolve()
        self.study_ref = StudyRef(name=prepared.study.study, fingerprint=fingerprint)

    def required(self, cell: Cell) -> set[str]:
        """The metrics that a hypothesis is about in this very cell, and that the cell must therefore report."""
        return {
            claim.metric
            for claim in self.prepared.study.hypotheses.values()
            if claim.metric is not None
            and claim.metric not in BUILT_IN_METRICS
            and cell.arm in (claim.compare.arm, claim.compare.to)
            and matches(cell, claim)
        }

    def launch(self, cell: Cell) -> Launch:
        """The program that runs a cell: the workload's own, or our worker."""
        chosen = self.prepared.workload
        if chosen.launch is None:
            return Launch((sys.executable, "-m", "coresident.lab.run.worker"))
        return chosen.launch(self.prepared.parameters(cell))

    def measure(self, cell: Cell, block: Block, device: Device, conditions: Conditions, lock: int) -> Record:
        """Run `cell` once and store its record. Raises `Dirty` (after storing) when the device does not come back clean.

        `lock` is the descriptor of the device's lock: the cell's shim holds it as well, so that the device stays locked
        until nothing of the cell is left, even when this process is killed.
        """
        try:
            return self._measure(cell, block, device, conditions, lock)
        except BrokenPipeError:
            # Nobody reads what the watcher prints: no fault of the disk.
            raise
        except OSError as error:
            raise MachineError(
                f"cannot write {error.filename or self.out}: {(error.strerror or str(error)).lower()}",
                "free space there or choose another --out, and repeat the command: what was finished is kept",
            ) from error

    def _measure(self, cell: Cell, block: Block, device: Device, conditions: Conditions, lock: int) -> Record:
        study, chosen = self.prepared.study, self.prepared.workload
        attempt = self.store.next_attempt(cell.id, block.repetition)
        repetition = self.out / "cells" / cell.id / f"r{block.repetition}"
        place = repetition / f"a{attempt}"
        work = repetition / "work" if chosen.resumable else place / "work"
        events = place / "events"
        for directory in (events, place / "telemetry", work):
            directory.mkdir(parents=True, exist_ok=True)
        cores = self.prepared.cores[cell.id]
        self._describe(cell, block, attempt, device, cores, place)
        self.watch.started(cell, block, attempt)

        limit, edges = study.clean_device_mib, self.edges
        before = preflight.device_clean(device, limit, edges.nvml, edges.patience)
        launch = self.launch(cell)
        foreign = chosen.launch is not None
        sampler = Sampler(device, place / "telemetry" / "samples.jsonl", edges.nvml)
        wall_clock, monotonic = edges.wall(), time.monotonic()

        def tick(shim: int) -> None:
            sampler.tick(shim)
            self.watch.ticked(time.monotonic() - monotonic, events)

        outcome = supervise(
            launch.argv,
            env=self._variables(launch, device, place, events, work),
            cwd=launch.directory or Path.cwd(),
            stdout=place / ("stdout" if foreign else "log"),
            stderr=place / ("stderr" if foreign else "log"),
            timeout=study.timeout,
            grace=study.grace,
            cpus={core for worker in cores for core in worker} or None,
            on_tick=tick,
            tick=TICK,
            stop=self.stop,
            hold=lock,
        )
        telemetry = sampler.stop()
        duration = time.monotonic() - monotonic
        clock_step = round((edges.wall() - wall_clock) - duration, 3)
        observed = read(events, monotonic, self._units(cell))
        leak = preflight.leak(device, before, limit, edges.nvml, edges.patience)

        checked = self._controls(observed, outcome, device, cores, before, leak, telemetry)
        failed = {name: control.reason for name, control in checked.items() if control.state == "failed"}
        status, reason = conclude(
            outcome,
            observed,
            required=self.required(cell),
            workers=self.prepared.needs[cell.id].workers,
            by_exit=foreign,
            failed_controls=failed,
        )
        record = Record(
            study=self.study_ref,
            cell=CellRef(
                id=cell.id,
                workload=cell.workload,
                arm=cell.arm,
                factors=dict(cell.factors),
                parameters=dict(cell.parameters),
                hash=cell.hash,
            ),
            conditions=conditions,
            block=block,
            attempt=attempt,
            continues=self._continues(cell, block, attempt),
            status=status,
            reason=reason,
            started=_utc(wall_clock),
            duration=round(duration, 6),
            clock_step=clock_step if abs(clock_step) > 0.5 else 0.0,
            metrics=_metrics(outcome, telemetry, observed),
            series=observed.series,
            digests=observed.digests,
            controls=checked,
            workers=observed.workers,
            phases=observed.phases,
            telemetry=telemetry,
            environment={**self._facts(device, cell), **observed.environment},
            argv=list(launch.argv),
            artifacts=_artifacts(work),
        )
        self.store.add(record)
        if not chosen.resumable:
            _drop_empty(work)
        self.watch.ended(record)
        if leak is not None:
            raise Dirty(leak)
        return record

    def _describe(
        self,
        cell: Cell,
        block: Block,
        attempt: int,
        device: Device,
        cores: Sequence[Sequence[int]],
        place: Path,
    ) -> None:
        described = {
            "cell": {
                "id": cell.id,
                "workload": cell.workload,
                "arm": cell.arm,
                "factors": dict(cell.factors),
                "parameters": dict(cell.parameters),
                "hash": cell.hash,
            },
            "repetition": block.repetition,
            "generation": block.generation,
            "attempt": attempt,
            "device": device.uuid,
            "cpus": [list(worker) for worker in cores],
            "controls": list(self.prepared.study.controls),
        }
        (place / "cell.json").write_text(json.dumps(described, indent=1), encoding="utf-8")

    def _units(self, cell: Cell) -> dict[str, str]:
        chosen = self.prepared.workload
        declared = [*chosen.metrics, *chosen.reports(self.prepared.parameters(cell)).values()]
        return {metric.name: metric.unit for metric in declared}

    def _variables(
        self, launch: Launch, device: Device, place: Path, events: Path, work: Path
    ) -> dict[str, str]:
        return {
            **os.environ,
            **launch.variables,
            EVENTS: str(events),
            CELL: str(place / "cell.json"),
            WORK: str(work),
            **device.variables(),
        }

    def _controls(
        self,
        observed: Observed,
        outcome: Outcome,
        device: Device,
        cores: Sequence[Sequence[int]],
        before: float,
        leak: str | None,
        telemetry: dict[str, Any],
    ) -> dict[str, Control]:
        """Every control that the study asks for, answered by the lab or by the workload; the workload's others beside.

        A device that was left dirty fails its control whether or not the study asks for it.
        """
        answered = dict(observed.controls)
        own = {
            "exclusive-device": lambda: controls.exclusive_device(device, before, leak, telemetry, outcome),
            "pinned-cpus": lambda: controls.pinned_cpus(cores, telemetry),
            "finite": lambda: controls.finite(observed),
        }
        asked = self.prepared.study.controls
        for name in asked if leak is None else {*asked, "exclusive-device"}:
            if name in own:
                answered[name] = own[name]()
            elif name not in answered:
                answered[name] = Control(
                    asked=True, ran=None, state="unverified", reason="the workload did not report it"
                )
        return answered

    def _continues(self, cell: Cell, block: Block, attempt: int) -> list[str]:
        if not self.prepared.workload.resumable:
            return []
        return [
            stored.record.id
            for stored in self.store.load()
            if stored.record.cell.hash == cell.hash
            and stored.record.block.repetition == block.repetition
            and stored.record.attempt < attempt
        ]

    def _facts(self, device: Device, cell: Cell) -> dict[str, Any]:
        return environment.environment(device, sorted(self.prepared.needs[cell.id].inputs), Path.cwd())


def _metrics(outcome: Outcome, telemetry: dict[str, Any], observed: Observed) -> dict[str, MetricValue]:
    """What every cell has for nothing, and what it reported."""
    built_in: dict[str, float | None] = {
        "wall_seconds": outcome.wall,
        "cpu_seconds": outcome.cpu,
        "peak_memory_mib": telemetry.get("peak_memory_mib"),
        "peak_device_memory_mib": telemetry.get("peak_device_memory_mib"),
        "energy_joules": telemetry.get("energy_joules"),
    }
    given = {
        name: MetricValue(value=float(value), unit=BUILT_IN_METRICS[name].unit)
        for name, value in built_in.items()
        if value is not None
    }
    return {**observed.metrics, **given}


def _artifacts(work: Path) -> dict[str, str]:
    """SHA-256 of every file that the cell left in its work directory (larger ones by size only)."""
    found = {}
    for path in sorted(work.rglob("*")):
        if path.is_file() and not path.is_symlink():
            size = path.stat().st_size
            name = str(path.relative_to(work))
            if size > LARGEST_ARTIFACT:
                found[name] = f"size:{size}"
                continue
            try:
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
            except PermissionError:
                # The modes of its files are the cell's business, and no reason to lose its record.
                found[name] = f"unreadable, size:{size}"
    return found


def _drop_empty(work: Path) -> None:
    if work.is_dir() and not any(work.iterdir()):
        shutil.rmtree(work, ignore_errors=True)


def _utc(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")
