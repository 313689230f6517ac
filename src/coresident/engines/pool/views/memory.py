"""`--view memory`: what each process of a pool held over time, by record.

Over time it is known where the run was measured, from the samples beside the records; records alone tell each process's
peak. On a card the driver tells processes apart rarely, so there it is the whole card's memory that has a course.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coresident.engines.pool.views.learners import WORKLOADS, series
from coresident.views import Seen, View, ViewTable

SAMPLES = Path("telemetry") / "samples.jsonl"
CARD = "whole card"
# The moments that a table shows, as shares of the time in which a process was seen.
MOMENTS = (0.0, 0.25, 0.5, 0.75, 1.0)


def data(seen: Sequence[Seen]) -> list[dict[str, Any]]:
    """For each record its processes: name, pid, peak in MiB, and [seconds, MiB] for each sample (none: only the peak is
    known). `source` says where it is from.
    """
    return [_record(one) for one in seen]


def _record(one: Seen) -> dict[str, Any]:
    told = {"record": one.id, "status": one.record.get("status"), "retracted": one.retracted}
    samples = [] if one.place is None else _lines(one.place / SAMPLES)
    if samples:
        return told | {"source": "samples", "processes": _over_time(samples, _names(one.record))}
    return told | {"source": "record", "processes": _peaks(one.record)}


def _over_time(samples: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[dict[str, Any]]:
    points: dict[str, list[list[float]]] = {}
    card: list[list[float]] = []
    for row in samples:
        for pid, held in row.get("processes", {}).items():
            if held is not None:
                points.setdefault(pid, []).append([row["t"], held])
        used = (row.get("card") or {}).get("used_mib")
        if used is not None:
            card.append([row["t"], used])
    found: list[dict[str, Any]] = [
        {
            "process": names.get(pid, "-"),
            "pid": int(pid),
            "peak_mib": max(held for _, held in one),
            "points": one,
        }
        for pid, one in points.items()
    ]
    found.sort(key=lambda one: (one["process"] == "-", _order(one["process"]), one["pid"]))
    if card:
        found.append(
            {"process": CARD, "pid": None, "peak_mib": max(held for _, held in card), "points": card}
        )
    return found


def _peaks(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = _names(record)
    telemetry = record.get("telemetry", {})
    found = [
        {
            "process": names.get(str(one["pid"]), "-"),
            "pid": one["pid"],
            "peak_mib": one["peak_pss_mib"],
            "points": [],
        }
        for one in telemetry.get("per_process") or ()
    ]
    found += [
        {"process": f"learner {learner} (its allocator)", "pid": None, "peak_mib": values[0], "points": []}
        for learner, values in series(record, "peak_memory_mib").items()
        if values
    ]
    whole = telemetry.get("device_peak_used_mib")
    if whole is None:
        whole = record.get("metrics", {}).get("device_peak_used_mib", {}).get("value")
    if whole is not None:
        found.append({"process": CARD, "pid": None, "peak_mib": whole, "points": []})
    return found


def _names(record: Mapping[str, Any]) -> dict[str, str]:
    """What each pid was, as the driver of the pool told."""
    told = record.get("environment", {}).items()
    return {str(pid): key.removeprefix("process ") for key, pid in told if key.startswith("process ")}


def _order(name: str) -> tuple[str, int]:
    word, _, number = name.rpartition(" ")
    return (word, int(number)) if number.isdigit() else (name, 0)


def _lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a file of samples; a last line that a kill tore is left out, and so is a file that is not there."""
    try:
        whole = file.read_bytes().split(b"\n")[:-1]
        return [json.loads(line) for line in whole if line.strip()]
    except (OSError, ValueError):
        return []


def tables(rows: Sequence[Mapping[str, Any]]) -> list[ViewTable]:
    """A table a record: MiB at five moments of each process's time, and the peak with its second; or peaks only."""
    return [_with_time(row) if row["source"] == "samples" else _without(row) for row in rows]


def _with_time(row: Mapping[str, Any]) -> ViewTable:
    told = []
    for one in row["processes"]:
        points = one["points"]
        first, last = points[0][0], points[-1][0]
        peak_at = max(points, key=lambda point: point[1])[0]
        course = [f"{_at(points, first + share * (last - first)):.1f}" for share in MOMENTS]
        window = (f"{first:.1f}", f"{last:.1f}")
        told.append((one["process"], _pid(one), *window, *course, f"{one['peak_mib']:.1f}", f"{peak_at:.1f}"))
    moments = ("first", *(f"{share:.0%}" for share in MOMENTS[1:-1]), "last")
    headers = ("process", "pid", "from s", "to s", *moments, "peak", "at s")
    title = f"{row['record']} ({row['status']}): MiB (proportional set size) over each process's time"
    return ViewTable(headers, tuple(told), title, frozenset(range(1, len(headers))))


def _without(row: Mapping[str, Any]) -> ViewTable:
    told = tuple(
        (one["process"], _pid(one), "-" if one["peak_mib"] is None else f"{one['peak_mib']:.1f}")
        for one in row["processes"]
    )
    title = (
        f"{row['record']} ({row['status']}): peaks in MiB; the course of memory stays where it was measured"
    )
    return ViewTable(("process", "pid", "peak"), told, title, frozenset({1, 2}))


def _pid(one: Mapping[str, Any]) -> str:
    return "-" if one["pid"] is None else str(one["pid"])


def _at(points: Sequence[Sequence[float]], moment: float) -> float:
    """What was held at a moment: the newest sample by then."""
    return next(held for t, held in reversed(points) if t <= moment or t == points[0][0])


view = View("memory", "what each process held over time", WORKLOADS, data, tables)
