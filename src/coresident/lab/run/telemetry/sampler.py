"""Samples a running cell: the memory of its processes, where they may run, the host's load, and the card.

Sampling costs the cell time (the kernel walks every mapping), so each sample is paid for by the pause after
it: it uses 4 % of one core at most, however much the cell has mapped.
"""

from __future__ import annotations

import json
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coresident.lab.run.machine import processes
from coresident.lab.run.machine.cores import read_back
from coresident.lab.run.machine.devices import Device
from coresident.lab.run.machine.nvml import Nvml, connect
from coresident.lab.run.telemetry.card import CardSampler

BUDGET = 0.04
SHORTEST = 0.02
# After this many rows only every second sample is written, then every fourth, and so on; peaks miss none.
ROWS = 2000
# A peak seen in fewer samples says when the cell was looked at, not what it needed.
FEWEST = 5
LISTED = 32
# A process is where it stays after so many looks that find the same cores. All are looked at again every so many samples.
SETTLED, RARELY = 3, 8


@dataclass
class _Seen:
    """What was seen of one process so far; memory in KiB. `sightings` counts how often its cores were
    these."""

    name: str
    peak_pss: int | None = None
    peak_rss: int = 0
    cpus: tuple[int, ...] = ()
    sightings: int = 0


class Sampler:
    """Telemetry of one cell, from its making (just before the cell starts) to `stop` (after the shim was
    waited for).

    `out` gets one JSON object a written sample: `t` (seconds since the start), `pss_mib` (sum), `processes`
    (pid to MiB), `available_mib` of the host, and the card's values on CUDA.
    """

    def __init__(self, device: Device, out: Path, nvml: Nvml | None = None) -> None:
        self._out = out
        self._file: Any = None
        self._card = CardSampler(nvml or connect(), device.uuid) if device.kind == "cuda" else None
        self._seen: dict[int, _Seen] = {}
        self._samples = self._rows = self._unreadable = 0
        self._peak = 0
        self._peak_at = 0.0
        self._longest = self._spent = self._due = self._last = 0.0
        self._host = processes.host()
        self._least_available = self._host.available_mib
        self._load = os.getloadavg()[0]
        self._cpu = _own_cpu()
        self._wall, self._start = time.time(), time.monotonic()

    def tick(self, shim_pid: int) -> None:
        """Take a sample of all processes below the shim, if one is due."""
        now = time.monotonic()
        if self._card is not None:
            # Ten microseconds: a short peak is not left to chance, as it must be in a walk of all mappings.
            self._card.look()
        if now < self._due:
            return
        before = time.thread_time()
        self._sample(shim_pid, now)
        cost = time.thread_time() - before
        self._spent += cost
        # Before the shim has started the cell there is nothing to see: look again at once.
        self._due = now + (max(SHORTEST, cost / BUDGET) if self._samples else 0.0)

    def _sample(self, shim_pid: int, now: float) -> None:
        pids = processes.below(shim_pid)
        found = [one for one in map(processes.footprint, pids) if one is not None]
        if not found:
            return
        if self._samples:
            self._longest = max(self._longest, now - self._last)
        self._last = now
        for one in found:
            seen = self._seen.setdefault(one.pid, _Seen(one.name))
            # A new process carries its parent's name until it calls exec.
            seen.name = one.name
            seen.peak_rss = max(seen.peak_rss, one.peak_rss)
            if one.pss is not None:
                seen.peak_pss = max(seen.peak_pss or 0, one.pss)
        # Each until it was seen to stay where it is, since it may be gone by the next look at all.
        everyone = self._samples % RARELY == 0
        self._look_at_cores([one.pid for one in found if everyone or self._seen[one.pid].sightings < SETTLED])
        self._samples += 1
        total = sum(one.pss or 0 for one in found)
        self._unreadable += any(one.pss is None for one in found)
        if total > self._peak:
            self._peak, self._peak_at = total, now - self._start
        available = processes.host().available_mib
        self._least_available = min(self._least_available, available)
        row = {
            "t": round(now - self._start, 4),
            "pss_mib": _mib(total),
            "processes": {str(one.pid): None if one.pss is None else _mib(one.pss) for one in found},
            "available_mib": round(available, 1),
        }
        if self._card is not None:
            row["card"] = self._card.sample({shim_pid, *pids})
        self._write(row)

    def _look_at_cores(self, pids: list[int]) -> None:
        for pid, sets in read_back(pids).items():
            together = tuple(sorted({core for one in sets for core in one}))
            seen = self._seen[pid]
            seen.sightings = seen.sightings + 1 if together == seen.cpus else 1
            seen.cpus = together

    def _write(self, row: dict[str, Any]) -> None:
        if (self._samples - 1) % 2 ** (self._rows // ROWS):
            return
        if self._file is None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._out.open("w", encoding="utf-8")
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._rows += 1

    def stop(self) -> dict[str, Any]:
        """End the telemetry. The summary, JSON-ready:

        `peak_memory_mib`: the highest sum of PSS over the cell's processes (None with `peak_memory_reason`
        where
        nothing could be read, or in fewer than five samples); `per_process`: the largest ones' own peaks; `samples`, `interval_s`
        (mean) and `longest_interval_s` say how closely it was watched; `foreign_cpu_seconds`: CPU time that
        others used on this host (all of it, less what this process and the children it waited for used),
        `stolen_cpu_seconds`: what the hypervisor took; `affinity`: the core sets that processes last had;
        `clock_step_s`: how far the wall clock ran from the monotonic one; on CUDA the card's summary
        beside.
        """
        ended = time.monotonic()
        if self._file is not None:
            self._file.close()
        window = ended - self._start
        host = processes.host()
        foreign = host.busy - self._host.busy - (_own_cpu() - self._cpu)
        reason = self._why_no_peak()
        summary: dict[str, Any] = {
            "peak_memory_mib": _mib(self._peak) if not reason else None,
            "peak_memory_at_s": round(self._peak_at, 3) if not reason else None,
            "per_process": self._largest(),
            "processes": len(self._seen),
            "samples": self._samples,
            "interval_s": round((self._last - self._start) / self._samples, 4) if self._samples else None,
            "longest_interval_s": round(self._longest, 4),
            "sampling_cpu_seconds": round(self._spent, 4),
            "window_s": round(window, 4),
            "clock_step_s": round(time.time() - self._wall - window, 3),
            "foreign_cpu_seconds": round(max(0.0, foreign), 3),
            "stolen_cpu_seconds": round(max(0.0, host.stolen - self._host.stolen), 3),
            "available_before_mib": round(self._host.available_mib, 1),
            "available_least_mib": round(self._least_available, 1),
            "load_average": [round(self._load, 2), round(os.getloadavg()[0], 2)],
            "affinity": self._affinity(),
        }
        if reason:
            summary["peak_memory_reason"] = reason
        if self._card is not None:
            summary.update(self._card.stop(window))
        return summary

    def _why_no_peak(self) -> str:
        if not self._samples:
            return "the cell ended before it could be sampled"
        if self._samples < FEWEST:
            return (
                f"seen in {self._samples} of the {FEWEST} samples that a peak needs: the cell was too short"
            )
        if self._unreadable:
            return f"smaps_rollup of the cell's processes could not be read in {self._unreadable} samples"
        return ""

    def _largest(self) -> list[dict[str, Any]]:
        ordered = sorted(self._seen.items(), key=lambda item: -(item[1].peak_pss or item[1].peak_rss))
        return [
            {
                "pid": pid,
                "name": seen.name,
                "peak_pss_mib": None if seen.peak_pss is None else _mib(seen.peak_pss),
                "peak_rss_mib": _mib(seen.peak_rss),
            }
            for pid, seen in ordered[:LISTED]
        ]

    def _affinity(self) -> list[dict[str, Any]]:
        """One entry a distinct core set: how many processes ended on it, some of their ids, and how often
        it was seen."""
        sets: dict[tuple[int, ...], list[tuple[int, _Seen]]] = {}
        for pid, seen in self._seen.items():
            if seen.cpus:
                sets.setdefault(seen.cpus, []).append((pid, seen))
        return [
            {
                "cpus": list(cpus),
                "processes": len(members),
                "pids": [pid for pid, _ in members[:LISTED]],
                "sightings": max(seen.sightings for _, seen in members),
            }
            for cpus, members in sorted(sets.items())
        ]


def _own_cpu() -> float:
    """CPU seconds of this process and of all children it has waited for, with their own."""
    used = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        spent = resource.getrusage(who)
        used += spent.ru_utime + spent.ru_stime
    return used


def _mib(kib: float) -> float:
    return round(kib / 1024, 3)
