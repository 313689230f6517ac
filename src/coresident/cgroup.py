"""What the control groups around this process allow: a share of the processors, and memory. Versions 1 and 2.

A group's limit binds all below it, so every ancestor counts and the narrowest wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Version 1 writes "no limit" as the largest page-aligned number.
_UNLIMITED = 2**60


@dataclass(frozen=True)
class Limits:
    """`cpus`: how many cores' worth of time (None: no quota). Memory in bytes: the lowest limit, and what
    is free below the narrowest group's limit, its file cache counted as free (None: no limit)."""

    cpus: float | None = None
    memory: int | None = None
    memory_free: int | None = None


def limits(root: Path = Path("/")) -> Limits:
    """The limits on this process; `root` stands for `/`, so that a test can build its own."""
    cpus: list[float] = []
    memory: list[tuple[int, int]] = []
    for kind, group in _groups(root):
        if kind in ("unified", "cpu"):
            cpus += _cpu_quota(group)
        if kind in ("unified", "memory"):
            memory += _memory(group)
    return Limits(
        cpus=min(cpus, default=None),
        memory=min((limit for limit, _ in memory), default=None),
        memory_free=min((free for _, free in memory), default=None),
    )


def _groups(root: Path) -> Iterator[tuple[str, Path]]:
    """Every directory from our own group up to the top of its hierarchy, with what it controls."""
    mounts = _mounts(root)
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, place = line.split(":", 2)
        kinds = ["unified"] if number == "0" and not controllers else controllers.split(",")
        for kind in kinds:
            for mounted, top in mounts.get(kind, []):
                # Inside a container the mount may show a subtree only, while the path is told from the
                # host's root.
                inner = place[len(mounted) :] if mounted != "/" and place.startswith(mounted) else place
                at = root / top.lstrip("/")
                parts = [part for part in inner.split("/") if part not in ("", "..")]
                for depth in range(len(parts), -1, -1):
                    yield kind, at.joinpath(*parts[:depth])


def _mounts(root: Path) -> dict[str, list[tuple[str, str]]]:
    """By controller (`unified` for version 2): the part of the hierarchy that is mounted, and where."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        before, after = left.split(), right.split()
        if len(before) < 5 or len(after) < 3:
            continue
        if after[0] == "cgroup2":
            found.setdefault("unified", []).append((before[3], before[4]))
        elif after[0] == "cgroup":
            for option in after[2].split(","):
                found.setdefault(option, []).append((before[3], before[4]))
    return found


def _cpu_quota(group: Path) -> list[float]:
    told = _words(group / "cpu.max")
    if len(told) == 2 and told[0] != "max":
        return [int(told[0]) / int(told[1])]
    quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return [quota / period] if quota is not None and period and quota > 0 else []


def _memory(group: Path) -> list[tuple[int, int]]:
    for limit_name, used_name, total in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, used = _number(group / limit_name), _number(group / used_name)
        if limit is not None and limit < _UNLIMITED:
            # What was read once and what was read again: both make room, as they do in the machine's MemAvailable.
            told = group / "memory.stat"
            cache = _statistic(told, f"{total}inactive_file") + _statistic(told, f"{total}active_file")
            return [(limit, max(0, limit - max(0, (used or 0) - cache)))]
    return []


def _statistic(path: Path, name: str) -> int:
    for line in _lines(path):
        words = line.split()
        if len(words) == 2 and words[0] == name:
            return int(words[1])
    return 0


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if len(words) == 1 and words[0].lstrip("-").isdigit() else None


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
