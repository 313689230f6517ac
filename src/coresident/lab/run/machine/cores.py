"""Gives each worker of a cell cores of its own, from those that this process may really use; never the same
core twice."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

from coresident import cgroup
from coresident.errors import MachineError
from coresident.workload import Needs


def allowed() -> list[int]:
    """The cores that this process may be scheduled on, ascending. (`os.cpu_count` ignores affinity and
    cgroups.)"""
    return sorted(os.sched_getaffinity(0))


def usable(cores: list[int], quota: float | None) -> int:
    """How many workers' cores can be busy all the time: affinity, and whole cores within a cgroup's quota."""
    return len(cores) if quota is None else min(len(cores), math.floor(quota + 1e-6))


def assign(needs: Needs, cores: Iterable[int] | None = None, quota: float | None = None) -> list[list[int]]:
    """Disjoint core sets, one a worker: `workers` lists of `cpus_per_worker` core numbers (empty lists:
    unpinned).

    One hardware thread of every core is given out before any second one. `cores` and `quota` (cores' worth
    of time) are the machine's own when not given. Raises `MachineError`, saying what is asked and what
    there is, rather than give a core to two workers.
    """
    if needs.cpus_per_worker == 0:
        return [[] for _ in range(needs.workers)]
    if cores is None:
        mine, limit = allowed(), cgroup.limits().cpus
    else:
        mine, limit = sorted(cores), quota
    asked, there = needs.workers * needs.cpus_per_worker, usable(mine, limit)
    if asked > there:
        quoted = (
            f" (a cgroup's quota allows {limit:g} of {len(mine)})"
            if limit is not None and there < len(mine)
            else ""
        )
        raise MachineError(
            f"the cell asks for {asked} cores ({needs.workers} workers x {needs.cpus_per_worker}),"
            f" {there} are usable{quoted}",
            "ask for fewer workers or cores each, leave them unpinned (0 each), or use a larger machine",
        )
    ordered = spread(mine)
    size = needs.cpus_per_worker
    return [sorted(ordered[worker * size : (worker + 1) * size]) for worker in range(needs.workers)]


def spread(cores: list[int], topology: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """`cores` with the first hardware thread of every physical core before the second ones."""
    rank: dict[int, int] = {}
    for core in cores:
        try:
            siblings = parse_list(
                (topology / f"cpu{core}/topology/thread_siblings_list").read_text(encoding="ascii")
            )
        except (OSError, ValueError):
            siblings = [core]
        rank[core] = (
            [sibling for sibling in siblings if sibling in cores].index(core) if core in siblings else 0
        )
    return sorted(cores, key=lambda core: (rank[core], core))


def parse_list(text: str) -> list[int]:
    """The kernel's way to write core sets.

    >>> parse_list("0-2,5")
    [0, 1, 2, 5]
    """
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found += range(int(first), int(last or first) + 1)
    return found


def read_back(pids: Iterable[int], proc: Path = Path("/proc")) -> dict[int, list[list[int]]]:
    """The distinct core sets that the threads of each process may use now; processes that are gone are left
    out."""
    found: dict[int, list[list[int]]] = {}
    for pid in pids:
        sets: set[tuple[int, ...]] = set()
        try:
            threads = list((proc / str(pid) / "task").iterdir())
        except OSError:
            continue
        for thread in threads:
            try:
                status = (thread / "status").read_bytes()
            except OSError:
                continue
            told = status.partition(b"\nCpus_allowed_list:")[2].partition(b"\n")[0]
            if told:
                sets.add(tuple(parse_list(told.decode())))
        if sets:
            found[pid] = [list(one) for one in sorted(sets)]
    return found
