"""What a cell said of itself, read strictly from its event files, so that nothing doubtful becomes data.

What is doubtful is named with file and line, and decides the cell's status (see `status`). Rules where
processes could disagree: a metric, a series, a digest or a worker is reported once, by one process; a second
report of the same name is a fault, even in another scope. A control may be answered by several, and the worst
answer counts. Environments are joined; values that differ are kept, all of them, under `differing`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from coresident.lab.records.digests import series_digest
from coresident.lab.records.schema import Control, MetricValue, Phase, Series, Worker
from coresident.lab.run.reported.fields import Fault, NotFinite, checked_event, same, shown
from coresident.lab.run.reported.lines import Line, lines
from coresident.lab.run.reported.throughput import throughput
from coresident.lab.study.metrics import BUILT_IN_METRICS

SERIES_KEPT = 1000
SAMPLES_KEPT = 10_000
PHASES_KEPT = 1000
FILES_READ = 4096
FAULTS_KEPT = 20
EARLY = 1.0  # seconds by which an event may seem to precede the cell's start

Failure = Literal["failed", "oom", "nonfinite"]


@dataclass
class Observed:
    """Everything that was reported.

    `metrics` include the medians of samples whose metric nobody reported, and `throughput` where workers of
    one unit reported windows and no rate. `phases` are in seconds since the cell's start, `workers` in monotonic seconds.
    `done`: a process said that all is done. `failed`: the first reported failure (status, reason),
    `failed_at` when (monotonic). `faults` are lines that cannot be trusted, `nonfinite` values that are no
    finite numbers, `torn` last lines cut short: for each a sentence that names file and line. `notes` are of
    no consequence.
    """

    metrics: dict[str, MetricValue] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    controls: dict[str, Control] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    failed: tuple[Failure, str] | None = None
    failed_at: float | None = None
    faults: list[str] = field(default_factory=list)
    nonfinite: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read(directory: Path, started: float, units: Mapping[str, str] | None = None) -> Observed:
    """Read every event file of a cell that began at `started` (monotonic seconds).

    `units` are those the workload declares: another one reported for the same metric is a fault, and samples
    that come without a unit take the declared one.
    """
    reader = _Reader(started, units or {})
    found = sorted(directory.iterdir()) if directory.is_dir() else []
    for path in found[:FILES_READ]:
        if path.suffix == ".jsonl":
            reader.file(path)
        else:
            reader.fault(path.name, "is not read: a file of events is named *.jsonl")
    if len(found) > FILES_READ:
        reader.fault(directory.name, f"holds more than {FILES_READ} files")
    return reader.finish()


class _Reader:
    """Collects the events of all files."""

    def __init__(self, started: float, units: Mapping[str, str]) -> None:
        self.started, self.units = started, units
        self.seen = Observed()
        self.faults = 0
        self.sample_units: dict[str, str] = {}
        self.reported: dict[tuple[str, str], str] = {}
        self.place = ""

    def fault(self, place: str, what: str) -> None:
        self.faults += 1
        if self.faults <= FAULTS_KEPT:
            self.seen.faults.append(f"{place} {what}")

    def file(self, path: Path) -> None:
        self.open_phases: dict[tuple[str, float], int] = {}
        for line in lines(path):
            self.place = f"{path.name} line {line.number}" if line.number else path.name
            self.line(line)

    def line(self, line: Line) -> None:
        if line.value is None:
            if line.torn:
                self.seen.torn.append(f"{self.place} is cut short")
            else:
                self.fault(self.place, line.fault)
            return
        try:
            event, fields = checked_event(line.value)
            getattr(self, f"_{event}")(**fields)
        except NotFinite as fault:
            if len(self.seen.nonfinite) < FAULTS_KEPT:
                self.seen.nonfinite.append(f"{self.place}: {fault}")
        except Fault as fault:
            self.fault(f"{self.place}:", str(fault))

    def once(self, kind: str, name: str) -> None:
        first = self.reported.setdefault((kind, name), self.place)
        if first != self.place:
            raise Fault(f"{kind} {name!r} was already reported in {first}")

    def when(self, what: str, value: float) -> float:
        if value < self.started - EARLY:
            raise Fault(
                f"{what}: {value} is before the cell began ({self.started:.3f}): times are monotonic seconds"
            )
        return value

    def _phase(
        self, name: str, start: float | None = None, end: float | None = None, t: float | None = None
    ) -> None:
        begun = start if start is not None else t
        if begun is None:
            raise Fault(f"phase {name!r} lacks the field 'start' (or 't')")
        phase = Phase(
            name=name,
            start=self.when("start", begun) - self.started,
            end=None if end is None else self.when("end", end) - self.started,
        )
        # Told once when it begins and, by our reporter, again when it has ended.
        known = self.open_phases.get((name, begun))
        if known is not None:
            self.seen.phases[known] = phase
        elif len(self.seen.phases) < PHASES_KEPT:
            self.open_phases[name, begun] = len(self.seen.phases)
            self.seen.phases.append(phase)
        elif len(self.seen.phases) == PHASES_KEPT:
            note = f"only the first {PHASES_KEPT} phases are kept"
            if note not in self.seen.notes:
                self.seen.notes.append(note)

    def _progress(self, **_: Any) -> None:
        """For whoever watches the run; a record has no use for it."""

    def _metric(
        self,
        name: str,
        value: float,
        unit: str,
        scope: Literal["session", "cumulative"] = "session",
        t: float | None = None,
    ) -> None:
        del t
        self._own_name(name)
        self.once("metric", name)
        self.seen.metrics[name] = MetricValue(value=value, unit=self._unit(name, unit), scope=scope)

    def _sample(self, name: str, value: float, unit: str = "", t: float | None = None) -> None:
        del t
        self._own_name(name)
        if self.sample_units.setdefault(name, unit) != unit:
            raise Fault(f"sample {name!r} is in {unit!r} here and in {self.sample_units[name]!r} before")
        self.seen.samples.setdefault(name, []).append(value)

    def _own_name(self, name: str) -> None:
        if name in BUILT_IN_METRICS:
            raise Fault(f"metric {name!r} is the lab's own measurement: report yours under another name")

    def _unit(self, name: str, unit: str) -> str:
        declared = self.units.get(name, "")
        if declared and unit and unit != declared:
            raise Fault(f"metric {name!r} is reported in {unit!r} and declared in {declared!r}")
        return unit or declared

    def _series(self, name: str, values: list[float | None], t: float | None = None) -> None:
        del t
        self.once("series", name)
        kept = values if len(values) <= SERIES_KEPT else []
        self.seen.series[name] = Series(digest=series_digest(values), length=len(values), values=kept)

    def _digest(self, name: str, value: str, t: float | None = None) -> None:
        del t
        self.once("digest", name)
        self.seen.digests[name] = value

    def _control(
        self, name: str, asked: Any, ran: Any, reason: str = "", t: float | None = None, **given: Any
    ) -> None:
        del t
        passed = given["passed"] if "passed" in given else None if ran is None else same(asked, ran)
        state: Literal["passed", "failed", "unverified"]
        state = "unverified" if passed is None else "passed" if passed else "failed"
        if not reason and state != "passed":
            reason = (
                f"asked {shown(asked)}, ran {shown(ran)}" if ran is not None else "what ran was not reported"
            )
        known = self.seen.controls.get(name)
        worse = ("passed", "unverified", "failed")
        if known is None or worse.index(state) > worse.index(known.state):
            self.seen.controls[name] = Control(asked=asked, ran=ran, state=state, reason=reason)

    def _worker(
        self, id: str, start: float, end: float, work: float, unit: str, t: float | None = None
    ) -> None:
        del t
        if end < start:
            raise Fault(f"worker {id!r} ends at {end}, before it starts at {start}")
        if work < 0:
            raise Fault(f"worker {id!r} did {work}, less than nothing")
        self.when("start", start)
        self.once("worker", id)
        self.seen.workers.append(Worker(id=id, start=start, end=end, work=work, unit=unit))

    def _environment(self, values: dict[str, Any], t: float | None = None) -> None:
        del t
        known = self.seen.environment
        for name, value in values.items():
            if name not in known:
                known[name] = value
            elif not same(known[name], value):
                others = known.setdefault("differing", {}).setdefault(name, [known[name]])
                if len(others) < 16 and not any(same(value, other) for other in others):
                    others.append(value)

    def _failed(self, status: Failure, reason: str, t: float | None = None) -> None:
        # Several processes may report what one of them caused: the first in time is the cause.
        if self.seen.failed is None or (t is not None and t < (self.seen.failed_at or math.inf)):
            self.seen.failed, self.seen.failed_at = (status, reason), t

    def _done(self, t: float | None = None) -> None:
        del t
        self.seen.done = True

    def finish(self) -> Observed:
        seen = self.seen
        for name, samples in seen.samples.items():
            kept = samples[:SAMPLES_KEPT]
            if len(kept) < len(samples):
                seen.notes.append(
                    f"only the first {SAMPLES_KEPT} of {len(samples)} samples of {name!r} are kept"
                )
            try:
                unit = self._unit(name, self.sample_units[name])
            except Fault as fault:
                self.fault("samples:", str(fault))
                continue
            metric = seen.metrics.get(name) or MetricValue(value=_median(samples), unit=unit)
            if unit and metric.unit != unit:
                self.fault(
                    "samples:", f"metric {name!r} is in {metric.unit!r}, and its samples are in {unit!r}"
                )
            seen.metrics[name] = metric.model_copy(update={"samples": kept})
        # Who reports a rate has computed one from the same windows; two names for it would only confuse.
        rate = throughput(seen.workers)
        if rate is not None and not any(metric.unit.endswith("/s") for metric in seen.metrics.values()):
            seen.metrics["throughput"] = rate
        if self.faults > FAULTS_KEPT:
            seen.faults.append(f"and {self.faults - FAULTS_KEPT} more")
        return seen


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return ordered[middle - 1] / 2 + ordered[middle] / 2
