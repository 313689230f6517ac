"""How much of some memory lies in huge pages, as the kernel says it (smaps)."""

from __future__ import annotations

import re
from pathlib import Path

_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
_PAGES = re.compile(r"AnonHugePages: +(\d+) kB")


def share(address: int, size: int) -> float | None:
    """Of the private memory at `address`, the share in huge pages: of the whole mapping, if the kernel made one of it and its
    neighbours. None where no mapping is told.
    """
    whole = huge = 0
    inside = False
    try:
        # Mapped files are listed by their paths, which may be any bytes.
        told = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in told.splitlines():
        if found := _RANGE.match(line):
            start, end = (int(number, 16) for number in found.groups())
            inside = start < address + size and address < end
            whole += (end - start) * inside
        elif inside and (found := _PAGES.match(line)):
            huge += int(found[1]) << 10
    return huge / whole if whole else None
