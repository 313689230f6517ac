"""Runs a study: checks all of it before anything is written, then measures, block by block, exactly what is missing."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from coresident.errors import MachineError, UserError
from coresident.lab.records import generations
from coresident.lab.records.files import ASIDE
from coresident.lab.records.schema import Block, Conditions, Record
from coresident.lab.records.store import Store
from coresident.lab.run import broken, preflight
from coresident.lab.run.edges import Edges
from coresident.lab.run.locks import RunLock, device_lock
from coresident.lab.run.machine import environment
from coresident.lab.run.machine.devices import Device
from coresident.lab.run.measure import Bench, Dirty
from coresident.lab.run.notices import going_on, notices
from coresident.lab.run.prepare import Prepared
from coresident.lab.run.process.stop import Stop
from coresident.lab.run.watch import Watcher
from coresident.lab.study.blocks import Group, groups, order
from coresident.lab.study.cells import Cell
from coresident.lab.study.plan import Plan, reconcile
from coresident.lab.verdict import words
from coresident.lab.verdict.evidence import differing
from coresident.lab.verdict.judge import wide


@dataclass(frozen=True)
class Options:
    """How to run, as opposed to what: none of it changes a number's meaning."""

    out: Path
    devices: str = "cpu"
    budget_minutes: float | None = None
    retry: bool = False


@dataclass(frozen=True)
class Finished:
    """How a run ended: `stopped` says why it ended before all was measured ("" when it did not), `remedy` how to go on."""

    measured: int
    stopped: str = ""
    remedy: str = ""


def read_plan(out: Path) -> Plan | None:
    """The plan of an existing run directory, None where there is none yet. Refuses a directory that is something else."""
    path = out / "plan.json"
    if path.exists():
        return Plan.read(path)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is not a directory", "use another --out")
    strangers = sorted(one.name for one in out.iterdir() if not _ours(one)) if out.is_dir() else []
    if strangers:
        raise UserError(f"{out} holds {strangers[0]!r} and is no run directory", "use another --out")
    return None


def _ours(path: Path) -> bool:
    """Whether a run that was killed before it had a plan may have left this."""
    if path.name == "records":
        return not any(path.iterdir())
    return path.name in ("lock", "lock.holder") or path.name.startswith(ASIDE)


def run(prepared: Prepared, options: Options, watch: Watcher, edges: Edges | None = None) -> Finished:
    """Measure what is missing. Records are in the store when this returns or raises; nothing finished is ever lost."""
    edges = edges or Edges()
    study, out, disk = prepared.study, options.out, edges.disk
    read_plan(out)
    preflight.disk(out)
    disk.directory(out)
    with RunLock(out), Stop(watch.note) as stop:
        disk.directory(out / "records")
        store = Store(out, disk)
        store.sweep()
        has_data = bool(store.load())
        before = read_plan(out)
        plan = reconcile(before, study, prepared.workload, has_data=has_data)
        # The plan first: a hypothesis that came after data is marked before a verdict can find it in the study.
        disk.replace(out / "plan.json", plan.text().encode())
        disk.replace(out / "study.yaml", prepared.loaded.text.encode())
        watch.planned(study, prepared.cells, out)
        for notice in notices(study, prepared.workload, before, plan):
            watch.note(notice)
        return _Campaign(prepared, options, watch, stop, store, plan.fingerprint, edges).run()


class _Stopped(Exception):  # noqa: N818 - not an error
    """The run ends before all is measured."""

    def __init__(self, why: str, remedy: str = "repeat the command to go on") -> None:
        super().__init__(why)
        self.remedy = remedy


class _Campaign:
    """One run's state while it goes."""

    def __init__(
        self,
        prepared: Prepared,
        options: Options,
        watch: Watcher,
        stop: Stop,
        store: Store,
        fingerprint: str,
        edges: Edges,
    ) -> None:
        self.prepared, self.options, self.watch, self.stop, self.store = prepared, options, watch, stop, store
        self.edges = edges
        self.deadline = (
            None if options.budget_minutes is None else time.monotonic() + 60 * options.budget_minutes
        )
        self.measured = 0
        self.bench = Bench(prepared, options.out, fingerprint, watch, stop, store, edges)
        self.conditions = {device.uuid: self._conditions(device) for device in prepared.devices}
        # What --retry runs again: all that stood before this run and is not ok. What it measures itself counts as always.
        self.retried = {record.id for record in store.active() if options.retry and record.status != "ok"}

    def _conditions(self, device: Device) -> Conditions:
        launches = [self.bench.launch(cell) for cell in self.prepared.cells]
        # A program's file is what its own working directory makes of its name.
        files = {
            str(file.absolute())
            for launch in launches
            for file in environment.files_of(launch.argv, launch.directory or Path.cwd())
        }
        inputs = sorted({path for needs in self.prepared.needs.values() for path in needs.inputs})
        cwd = launches[0].directory or Path.cwd()
        name = self.prepared.workload.name
        return environment.conditions(device, name, sorted(files), inputs, cwd, self.edges.nvml)

    def _records(self) -> tuple[list[Record], list[Record]]:
        """The records that count, and those that counted once: retracted, or to be run again."""
        active, retracted = self.store.active(), self.store.retracted()
        again = [record for record in active if record.id in self.retried]
        return [record for record in active if record.id not in self.retried], [*retracted, *again]

    def run(self) -> Finished:
        study = self.prepared.study
        blocks = groups(study, self.prepared.cells)
        try:
            for repetition in range(study.repetitions.limit):
                if repetition >= study.repetitions.min:
                    left = self._wide(repetition)
                    if not left:
                        break
                    there = any(one.block.repetition == repetition for one in self._records()[0])
                    if repetition == study.repetitions.min and not there:
                        self.watch.note(going_on(study, left))
                for group in blocks:
                    device = self.prepared.devices[repetition % len(self.prepared.devices)]
                    self._block(group, repetition, device)
        except _Stopped as why:
            return Finished(self.measured, str(why), why.remedy)
        return Finished(self.measured)

    def _wide(self, repetition: int) -> list[str]:
        """Comparisons still too wide after `repetition` blocks; a block that is already there is not asked about again."""
        records = [record for record in self._records()[0] if record.block.repetition < repetition]
        return wide(self.prepared.study, self.prepared.cells, records)

    def _block(self, group: Group, repetition: int, device: Device) -> None:
        study, conditions = self.prepared.study, self.conditions[device.uuid]
        members = [cell.id for cell in group.cells]
        in_order = order(group, repetition, study.seed)
        first, generation = True, 0
        while True:
            records, gone = self._records()
            state = generations.state(members, records, conditions.hash, repetition, study.attempts, gone)
            if state.closed or not state.missing:
                self._works(state, records)
                return
            if first and self.deadline is not None and time.monotonic() >= self.deadline:
                raise _Stopped(f"the budget of {self.options.budget_minutes:g} minutes is used up")
            if self.stop.finish:
                raise _Stopped("stopped as asked, with no cell running")
            first = False
            if state.generation != generation:
                generation = state.generation
                if generation > 0:
                    what = (
                        words.changed(differing(state.then.values, conditions.values)) if state.then else ""
                    )
                    why = f"{state.why} ({what})" if what else state.why
                    self.watch.note(f"block {repetition + 1}, generation {generation + 1}: {why}")
            position, cell = next((i, cell) for i, cell in enumerate(in_order) if cell.id in state.missing)
            block = Block(
                repetition=repetition, generation=state.generation, members=sorted(members), position=position
            )
            with contextlib.ExitStack() as held:
                try:
                    lock = held.enter_context(device_lock(device, self.watch.note, lambda: self.stop.finish))
                except MachineError as why:
                    if not self.stop.finish:
                        raise
                    raise _Stopped(why.problem) from None
                self._cell(cell, block, device, conditions, lock)

    def _works(self, state: generations.BlockState, records: list[Record]) -> None:
        """Stop at this block's edge where one of its cells used up its attempts and never worked."""
        told = broken.told(state.used_up, records, self.options.out)
        if told:
            raise _Stopped(
                told, "mend it (a changed arm needs another --out) and repeat the command with --retry"
            )

    def _cell(self, cell: Cell, block: Block, device: Device, conditions: Conditions, lock: int) -> None:
        try:
            record = self.bench.measure(cell, block, device, conditions, lock)
        except Dirty as left:
            self.measured += 1
            raise _Stopped(str(left)) from None
        self.measured += 1
        if record.status == "interrupted" or self.stop.now:
            raise _Stopped("interrupted")
        if self.stop.finish:
            raise _Stopped("stopped as asked, after the cell that was running")
