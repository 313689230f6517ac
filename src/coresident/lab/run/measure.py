"""Measures one cell once: preflight, start, watch, read, control, leak check, record."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
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
from coresident.lab.run import controls, preflight
from coresident.lab.run.attempt import Attempt
from coresident.lab.run.edges import Edges
from coresident.lab.run.machine import environment
from coresident.lab.run.machine.devices import Device
from coresident.lab.run.prepare import Prepared
from coresident.lab.run.process.stop import Stop
from coresident.lab.run.process.supervise import Outcome, supervise
from coresident.lab.run.reported.events import Observed, read
from coresident.lab.run.status import conclude
from coresident.lab.run.telemetry.sampler import Sampler
from coresident.lab.run.watch import Watcher
from coresident.lab.study.cells import Cell, matches
from coresident.lab.study.metrics import BUILT_IN_METRICS
from coresident.workload import Launch

TICK = 0.02
NOTED_CLOCK_STEP = 0.5


class Dirty(Exception):  # noqa: N818 - the cell is recorded; it is the device that is in no state to go on
    """The device was left dirty by a cell: nothing more can be measured on it now."""


@dataclass(frozen=True)
class _Seen:
    """What the lab itself saw of one attempt. `before` is in MiB, `duration` in seconds of the monotonic clock."""

    outcome: Outcome
    telemetry: dict[str, Any]
    before: float
    leak: str | None
    wall_clock: float
    duration: float
    clock_step: float


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
        resumable = self.prepared.workload.resumable
        number = self.store.next_attempt(cell.id, block.repetition)
        attempt = Attempt.make(self.out, cell.id, block.repetition, number, resumable)
        asked = CellRef(
            id=cell.id,
            workload=cell.workload,
            arm=cell.arm,
            factors=dict(cell.factors),
            parameters=dict(cell.parameters),
            hash=cell.hash,
        )
        attempt.describe(asked, block, device, self.prepared.cores[cell.id], self.prepared.study.controls)
        self.watch.started(cell, block, number)
        launch = self.launch(cell)
        began = time.monotonic()
        seen = self._watched(launch, attempt, device, cell, lock)
        observed = read(attempt.events, began, self._units(cell))
        checked = self._controls(observed, seen, device, cell)
        status, reason = conclude(
            seen.outcome,
            observed,
            required=self._required(cell),
            workers=self.prepared.needs[cell.id].workers,
            by_exit=self.prepared.workload.launch is not None,
            failed_controls={name: one.reason for name, one in checked.items() if one.state == "failed"},
        )
        record = Record(
            study=self.study_ref,
            cell=asked,
            conditions=conditions,
            block=block,
            attempt=number,
            continues=self._continues(cell, block, number) if resumable else [],
            status=status,
            reason=reason,
            started=_utc(seen.wall_clock),
            duration=round(seen.duration, 6),
            clock_step=seen.clock_step if abs(seen.clock_step) > NOTED_CLOCK_STEP else 0.0,
            metrics={**observed.metrics, **_built_in(seen)},
            series=observed.series,
            digests=observed.digests,
            controls=checked,
            workers=observed.workers,
            phases=observed.phases,
            telemetry=seen.telemetry,
            environment={**self._facts(device, cell), **observed.environment},
            argv=list(launch.argv),
            artifacts=attempt.artifacts(),
        )
        self.store.add(record)
        if not resumable:
            attempt.drop_empty_work()
        self.watch.ended(record)
        if seen.leak is not None:
            raise Dirty(seen.leak)
        return record

    def _watched(self, launch: Launch, attempt: Attempt, device: Device, cell: Cell, lock: int) -> _Seen:
        """Run the program from a clean device to a clean device, with telemetry."""
        study, edges = self.prepared.study, self.edges
        before = preflight.device_clean(device, study.clean_device_mib, edges.nvml, edges.patience)
        sampler = Sampler(device, attempt.samples, edges.nvml)
        wall_clock, monotonic = edges.wall(), time.monotonic()

        def tick(shim: int) -> None:
            sampler.tick(shim)
            self.watch.ticked(time.monotonic() - monotonic, attempt.events)

        stdout, stderr = attempt.outputs(apart=self.prepared.workload.launch is not None)
        outcome = supervise(
            launch.argv,
            env={**os.environ, **launch.variables, **attempt.variables(), **device.variables()},
            cwd=launch.directory or Path.cwd(),
            stdout=stdout,
            stderr=stderr,
            timeout=study.timeout,
            grace=study.grace,
            cpus={core for worker in self.prepared.cores[cell.id] for core in worker} or None,
            on_tick=tick,
            tick=TICK,
            stop=self.stop,
            hold=lock,
        )
        telemetry = sampler.stop()
        duration = time.monotonic() - monotonic
        clock_step = round((edges.wall() - wall_clock) - duration, 3)
        leak = preflight.leak(device, before, study.clean_device_mib, edges.nvml, edges.patience)
        return _Seen(outcome, telemetry, before, leak, wall_clock, duration, clock_step)

    def _required(self, cell: Cell) -> set[str]:
        """The metrics that a hypothesis is about in this very cell, and that the cell must therefore report."""
        return {
            claim.metric
            for claim in self.prepared.study.hypotheses.values()
            if claim.metric is not None
            and claim.metric not in BUILT_IN_METRICS
            and cell.arm in (claim.compare.arm, claim.compare.to)
            and matches(cell, claim)
        }

    def _units(self, cell: Cell) -> dict[str, str]:
        chosen = self.prepared.workload
        declared = [*chosen.metrics, *chosen.reports(self.prepared.parameters(cell)).values()]
        return {metric.name: metric.unit for metric in declared}

    def _controls(self, observed: Observed, seen: _Seen, device: Device, cell: Cell) -> dict[str, Control]:
        """Every control that the study asks for, answered by the lab or by the workload; the workload's others beside.

        A device that was left dirty fails its control whether or not the study asks for it.
        """
        answered = dict(observed.controls)
        own = {
            "exclusive-device": lambda: controls.exclusive_device(
                device, seen.before, seen.leak, seen.telemetry, seen.outcome
            ),
            "pinned-cpus": lambda: controls.pinned_cpus(self.prepared.cores[cell.id], seen.telemetry),
            "finite": lambda: controls.finite(observed),
        }
        asked = self.prepared.study.controls
        for name in asked if seen.leak is None else {*asked, "exclusive-device"}:
            if name in own:
                answered[name] = own[name]()
            elif name not in answered:
                answered[name] = Control(
                    asked=True, ran=None, state="unverified", reason="the workload did not report it"
                )
        return answered

    def _continues(self, cell: Cell, block: Block, attempt: int) -> list[str]:
        return [
            stored.record.id
            for stored in self.store.load()
            if stored.record.cell.hash == cell.hash
            and stored.record.block.repetition == block.repetition
            and stored.record.attempt < attempt
        ]

    def _facts(self, device: Device, cell: Cell) -> Mapping[str, Any]:
        return environment.environment(device, sorted(self.prepared.needs[cell.id].inputs), Path.cwd())


def _built_in(seen: _Seen) -> dict[str, MetricValue]:
    """The metrics that every cell has for nothing."""
    values: dict[str, float | None] = {
        "wall_seconds": seen.outcome.wall,
        "cpu_seconds": seen.outcome.cpu,
        "peak_memory_mib": seen.telemetry.get("peak_memory_mib"),
        "peak_device_memory_mib": seen.telemetry.get("peak_device_memory_mib"),
        "energy_joules": seen.telemetry.get("energy_joules"),
    }
    return {
        name: MetricValue(value=float(value), unit=BUILT_IN_METRICS[name].unit)
        for name, value in values.items()
        if value is not None
    }


def _utc(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")
