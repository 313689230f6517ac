"""How often the kernel killed for want of memory: what tells such a kill from any other SIGKILL."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def _counter() -> Path | None:
    """The nearest counter: our cgroup's (version 2, then 1), else the whole host's."""
    root = Path("/sys/fs/cgroup")
    candidates: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for number, controllers, path in (line.split(":", 2) for line in lines):
        # Inside a container the path may be the host's, which is not visible: the mount's root is our cgroup
        # then.
        if number == "0":
            candidates[:0] = [Path(f"{root}{path}/memory.events"), root / "memory.events"]
        elif "memory" in controllers.split(","):
            candidates += [root / "memory" / path.lstrip("/") / "memory.oom_control"]
            candidates += [root / "memory/memory.oom_control"]
    candidates.append(Path("/proc/vmstat"))
    return next((path for path in candidates if _read(path) is not None), None)


def _read(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def kills() -> int | None:
    """Kills for want of memory so far, in our cgroup or on the host; None when no counter can be read."""
    counter = _counter()
    return None if counter is None else _read(counter)
