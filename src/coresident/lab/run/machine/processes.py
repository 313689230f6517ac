"""Looks at the processes below one process through /proc: who they are, the memory they occupy, the CPU
time of the host.

Everything may vanish between two reads; what has vanished is left out, and never an error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Footprint:
    """A process's memory in KiB: `pss` counts a page shared by n processes as 1/n; `peak_rss` is the
    kernel's own high water of resident pages, shared ones in full. `pss` is None where the kernel does not
    let us read it."""

    pid: int
    name: str
    pss: int | None
    rss: int
    peak_rss: int


def below(pid: int, proc: Path = PROC) -> list[int]:
    """Ids of all processes below `pid`, without itself."""
    found: list[int] = []
    ahead = [pid]
    while ahead:
        children = _children(ahead.pop(), proc)
        if children is None:
            return _below_by_scan(pid, proc)
        # A process that is reparented while we look may be met twice.
        new = [child for child in children if child not in found]
        found += new
        ahead += new
    return found


def _children(pid: int, proc: Path) -> list[int] | None:
    """Children of every thread of a process; None if this kernel does not tell them."""
    children: list[int] = []
    try:
        threads = os.listdir(f"{proc}/{pid}/task")  # noqa: PTH208 - called for every process at every sample
    except OSError:
        return children
    for thread in threads:
        told = _read(f"{proc}/{pid}/task/{thread}/children")
        if told is None:
            if Path(f"{proc}/{pid}/task/{thread}").exists():
                return None
            continue
        children += [int(word) for word in told.split()]
    return children


def _below_by_scan(pid: int, proc: Path) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir(proc):  # noqa: PTH208 - as above
        told = _read(f"{proc}/{name}/stat") if name.isdigit() else None
        if told is not None:
            # The name in parentheses may itself hold spaces and parentheses.
            parent = int(told.rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    ahead = [pid]
    while ahead:
        new = [child for child in children.get(ahead.pop(), []) if child not in found]
        found += new
        ahead += new
    return found


def footprint(pid: int, proc: Path = PROC) -> Footprint | None:
    """What a process occupies now; None if it is gone or a zombie."""
    status = _read(f"{proc}/{pid}/status")
    if status is None or b"\nVmRSS:" not in status:
        return None
    try:
        rollup: bytes | None = Path(f"{proc}/{pid}/smaps_rollup").read_bytes()
    except OSError:
        # Not permitted, or gone? The second is the rule, and then its status is gone too.
        rollup = None
        if b"\nVmRSS:" not in (_read(f"{proc}/{pid}/status") or b""):
            return None
    return Footprint(
        pid=pid,
        name=_field(status, b"Name:").decode(errors="replace"),
        pss=None if rollup is None else _kib(rollup, b"\nPss:"),
        rss=_kib(status, b"\nVmRSS:"),
        peak_rss=_kib(status, b"\nVmHWM:"),
    )


@dataclass(frozen=True)
class HostLoad:
    """The whole host since its start, in seconds of CPU time: `busy` in programs and the kernel, `stolen`
    by the hypervisor; and memory available now in MiB."""

    busy: float
    stolen: float
    available_mib: float


def host(proc: Path = PROC) -> HostLoad:
    """The host's counters (clock-tick resolution: 10 ms as a rule)."""
    words = (_read(f"{proc}/stat") or b"").partition(b"\n")[0].split()
    ticks = [int(word) for word in words[1:]]
    second = os.sysconf("SC_CLK_TCK")
    # user (guests' time included), nice and system: what processes' own times add up to.
    busy = sum(ticks[:3]) / second
    stolen = ticks[7] / second if len(ticks) > 7 else 0.0
    return HostLoad(busy, stolen, _kib(_read(f"{proc}/meminfo") or b"", b"\nMemAvailable:") / 1024)


def _field(text: bytes, name: bytes) -> bytes:
    return text.partition(name)[2].partition(b"\n")[0].strip()


def _kib(text: bytes, name: bytes) -> int:
    told = _field(text, name).split()
    return int(told[0]) if told else 0


def _read(path: str) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        parts = []
        while part := os.read(descriptor, 65536):
            parts.append(part)
        return b"".join(parts)
    except OSError:
        # A process that ended after the open.
        return b""
    finally:
        os.close(descriptor)
