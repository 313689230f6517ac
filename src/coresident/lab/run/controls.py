"""The controls that the lab itself answers: what was asked, what took effect, and what follows.

Only what was seen decides. What cannot be seen is unverified, with the reason; it is never taken for good
or bad.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from coresident.lab.records.schema import Control
from coresident.lab.run.machine.cores import allowed
from coresident.lab.run.machine.devices import Device
from coresident.lab.run.telemetry.sampler import SETTLED

# Cores' worth of foreign work that is ordinary on a machine at rest.
QUIET = 0.1
# Below this many seconds the clock ticks that such times are counted in show.
LEAST_FOREIGN = 0.1


class Window(Protocol):
    """What the controls need of a supervised run."""

    @property
    def wall(self) -> float: ...


class Reported(Protocol):
    """What the controls need of a cell's events."""

    @property
    def metrics(self) -> Mapping[str, Any]: ...
    @property
    def samples(self) -> Mapping[str, Sequence[float]]: ...
    @property
    def series(self) -> Mapping[str, Any]: ...
    @property
    def nonfinite(self) -> Sequence[str]: ...


def exclusive_device(
    device: Device, before: float, leak: str | None, telemetry: Mapping[str, Any], outcome: Window
) -> Control:
    """Had the cell its device for itself?

    On the CPU the lock says that no other lab measured; other programs' CPU time beside the cell leaves it
    unverified. On a card memory before and after decides, and foreign processes where the driver shows
    them.
    """
    if device.kind == "cpu":
        return _quiet_host(telemetry, outcome)
    ran = {
        "before_mib": round(before, 1),
        "clean_after": leak is None,
        "foreign_pids": telemetry.get("foreign_pids"),
    }
    foreign = telemetry.get("foreign_pids")
    if foreign:
        return _control(
            "exclusive", ran, "failed", f"other processes computed on the device: {_some(foreign)}"
        )
    if leak is not None:
        return _control("exclusive", ran, "failed", leak)
    if foreign is None:
        return _control(
            "exclusive",
            ran,
            "unverified",
            "memory was clean before and after, but the device's processes cannot be seen",
        )
    return _control("exclusive", ran, "passed")


def _quiet_host(telemetry: Mapping[str, Any], outcome: Window) -> Control:
    foreign, stolen = telemetry.get("foreign_cpu_seconds"), telemetry.get("stolen_cpu_seconds") or 0.0
    ran = {"lock": "held", "foreign_cpu_seconds": foreign, "stolen_cpu_seconds": stolen}
    if foreign is None:
        return _control("exclusive", ran, "unverified", "the host's CPU time could not be read")
    others = foreign + stolen
    if others > max(LEAST_FOREIGN, QUIET * outcome.wall):
        return _control(
            "exclusive",
            ran,
            "unverified",
            f"others used {others:.2f} CPU seconds of this host during the cell's {outcome.wall:.2f} s",
        )
    return _control("exclusive", ran, "passed")


def pinned_cpus(asked: Sequence[Sequence[int]], telemetry: Mapping[str, Any]) -> Control:
    """Did the cell's processes run where they were told to?

    `asked`: one core set a worker (empty: unpinned). Every process must stay within the cell's cores, and
    every worker's own set must be some process's; unpinned processes must have all the cores that the lab
    has. A set that was seen once only may be a process on its way to its cores, and proves nothing.
    """
    seen = [
        (tuple(entry["cpus"]), entry["sightings"], entry["pids"]) for entry in telemetry.get("affinity") or ()
    ]
    ran: Any = [{"cpus": list(cpus), "pids": pids} for cpus, _, pids in seen]
    workers = [tuple(sorted(cores)) for cores in asked if cores]
    told: Any = [list(cores) for cores in workers] or "unpinned"
    if not seen:
        return _control(told, None, "unverified", "no process of the cell was seen while it ran")
    cell = {core for cores in workers for core in cores} or set(allowed())
    wrong = [
        (cpus, sightings, pids)
        for cpus, sightings, pids in seen
        if (not set(cpus) <= cell if workers else set(cpus) != cell)
    ]
    for cpus, sightings, pids in wrong:
        if sightings > 1:
            where = f"processes {_some(pids)} could run on cores {_some(cpus)}"
            return _control(
                told, ran, "failed", f"{where}, asked was {_some(sorted(cell)) if workers else 'unpinned'}"
            )
    if wrong:
        cpus, _, pids = wrong[0]
        reason = f"processes {_some(pids)} were seen once only, on cores {_some(cpus)}"
        return _control(told, ran, "unverified", reason)
    found = {cpus for cpus, _, _ in seen}
    lacking = [cores for cores in workers if cores not in found]
    if lacking:
        reason = f"no process was pinned to cores {_some(lacking[0])}"
        enough = max(sightings for _, sightings, _ in seen) >= SETTLED
        return _control(told, ran, "failed" if enough else "unverified", reason)
    return _control(told, ran if workers else "unpinned", "passed")


def finite(observed: Reported) -> Control:
    """Is every number that the cell reported finite? (What is not is kept out, and named in `nonfinite`.)"""
    if observed.nonfinite:
        return _control("finite", list(observed.nonfinite[:8]), "failed", observed.nonfinite[0])
    count = 0
    cut = [name for name, series in observed.series.items() if _cut(series)]
    for name, value in _numbers(observed):
        count += 1
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return _control(
                "finite", f"{name}: {value}", "failed", f"{name} is {_said(value)}, not a finite number"
            )
    if cut:
        reason = f"series {cut[0]!r} is too long to be kept, so not all of it was looked at"
        return _control("finite", {"numbers": count}, "unverified", reason)
    if count == 0:
        return _control("finite", {"numbers": 0}, "unverified", "the cell reported no numbers")
    return _control("finite", {"numbers": count}, "passed")


def _numbers(observed: Reported) -> Iterator[tuple[str, Any]]:
    for name, metric in observed.metrics.items():
        yield f"metric {name!r}", _inner(metric, "value")
        for place, value in enumerate(_inner(metric, "samples", ())):
            yield f"sample {place} of {name!r}", value
    for name, samples in observed.samples.items():
        for place, value in enumerate(samples):
            yield f"sample {place} of {name!r}", value
    for name, series in observed.series.items():
        for place, value in enumerate(_inner(series, "values")):
            yield f"series {name!r} at {place}", value


def _cut(series: Any) -> bool:
    """Is this a record's series whose values were left out for their number?"""
    length, values = _inner(series, "length", 0), _inner(series, "values")
    return isinstance(length, int) and length > len(values)


def _inner(value: Any, name: str, otherwise: Any = None) -> Any:
    """A field of a mapping or a model; a plain number or list is its own."""
    if isinstance(value, Mapping):
        return value.get(name, otherwise)
    return getattr(value, name, value if otherwise is None else otherwise)


def _control(asked: Any, ran: Any, state: Any, reason: str = "") -> Control:
    return Control(asked=asked, ran=ran, state=state, reason=reason)


def _said(value: Any) -> str:
    return "missing (not finite in the cell)" if value is None else repr(value)


def _some(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")
