"""How much memory a new process can have, on this machine and in the container that it runs in."""

from __future__ import annotations

import re
from pathlib import Path

from coresident import cgroup
from coresident.errors import MachineError


def memory(root: Path = Path("/")) -> int:
    """Bytes that a new process can have: the kernel's MemAvailable, or less where a control group says so."""
    try:
        text = (root / "proc/meminfo").read_text(encoding="ascii")
    except OSError as error:
        raise MachineError(f"cannot read /proc/meminfo: {error.strerror}", "mount /proc") from None
    told = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    if told is None:
        raise MachineError("/proc/meminfo tells no MemAvailable", "use Linux 3.14 or newer")
    free = int(told.group(1)) * 1024
    narrower = cgroup.limits(root).memory_free
    return free if narrower is None else min(free, narrower)
