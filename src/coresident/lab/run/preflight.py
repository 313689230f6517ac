"""Refuses to measure on a machine that cannot, or on a device that is not clean; and looks again after the
cell.

Unreadable device memory refuses: a number measured beside an unseen neighbour is worse than none.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from coresident import available
from coresident.errors import MachineError
from coresident.lab.run.machine.devices import Device
from coresident.lab.run.machine.nvml import MIB, NoDriver, Nvml, Unreadable, connect
from coresident.workload import Needs

# A dying process's device memory comes back after a second or so; so does that of a cell which ended just
# before.
PATIENCE = 5.0
_POLL = 0.05
LEAST_DISK = 64 * MIB


def memory(needs: Needs, root: Path = Path("/"), card: bool = False) -> None:
    """Refuse a cell that asks for more memory than the host and its control groups have free now.

    On a `card`, what lies there is not asked of the host: there, running out is an outcome of the cell.
    """
    free = available.memory(root)
    asked = needs.memory - (needs.on_card if card else 0)
    if asked > free:
        raise MachineError(
            f"the cell needs at least {_size(asked)} of memory and {_size(free)} is free:"
            f" {_size(asked - free)} is missing",
            "ask for less (fewer workers, a smaller model), free memory, or use a larger machine",
        )


def disk(where: Path, least: int = LEAST_DISK) -> None:
    """Refuse a run directory (it need not exist yet) that cannot be written, or has less than `least` bytes
    free."""
    place = standing(where)
    if not place.is_dir():
        raise MachineError(
            f"cannot write to {where}: {place} is no directory", "choose another directory by --out"
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise MachineError(
            f"cannot write to {where}: {place} is not writable", "choose a writable directory by --out"
        )
    free = shutil.disk_usage(place).free
    if free < least:
        raise MachineError(
            f"{_size(free)} is free on the disk of {where}, and at least {_size(least)} is needed",
            "free disk space, or choose another disk by --out",
        )


def standing(where: Path) -> Path:
    """`where`, or the nearest folder above it that is there."""
    place = where.absolute()
    # Path.exists raises where a folder on the way may not be searched.
    while not os.path.exists(place) and place != place.parent:  # noqa: PTH110
        place = place.parent
    return place


def device_clean(device: Device, limit: float, nvml: Nvml | None = None, patience: float = PATIENCE) -> float:
    """MiB in use on the device before a cell (0 on the CPU). Raises `MachineError` if above `limit`, or
    unreadable.

    Memory that is still going away is waited for, `patience` seconds at most.
    """
    if device.kind == "cpu":
        return 0.0
    driver = _driver(device, nvml)
    used = settled(device, driver, limit, patience)
    if used is None:
        raise MachineError(
            f"memory of device {device.uuid} cannot be read, so nothing says that it is free",
            "see `coresident doctor`; measure where NVML answers",
        )
    if used > limit:
        raise MachineError(
            f"{used:.0f} MiB are in use on device {device.uuid} (limit: {limit:g} MiB),"
            f" {held_by(driver, device.uuid)}",
            "end what uses the device, or raise clean_device_mib in the study if this use is harmless",
        )
    return used


def leak(
    device: Device, before: float, limit: float, nvml: Nvml | None = None, patience: float = PATIENCE
) -> str | None:
    """Why the device is not as clean after a cell as it must be (None: it is), once memory had time to come
    back."""
    if device.kind == "cpu":
        return None
    try:
        after = settled(device, _driver(device, nvml), limit, patience)
    except MachineError:
        after = None
    return leaked(device.uuid, before, after, limit)


def leaked(uuid: str, before: float, after: float | None, limit: float) -> str | None:
    """The decision alone: MiB in use before and after, None for a card that no longer answers."""
    if after is None:
        return f"memory of device {uuid} cannot be read after the cell (before: {before:.0f} MiB in use)"
    if after > limit:
        return (
            f"{after:.0f} MiB are still in use on device {uuid} after the cell"
            f" (before: {before:.0f} MiB, limit: {limit:g} MiB)"
        )
    return None


def settled(device: Device, nvml: Nvml, limit: float, patience: float) -> float | None:
    """MiB in use on the device, once at or below `limit` or after `patience` seconds; None: unreadable."""
    deadline = time.monotonic() + patience
    while True:
        try:
            used: float | None = nvml.memory_used(device.uuid) / MIB
        except Unreadable:
            used = None
        if (used is not None and used <= limit) or time.monotonic() >= deadline:
            return used
        time.sleep(_POLL)


def held_by(nvml: Nvml, uuid: str) -> str:
    """In words, which processes hold the device."""
    holders = nvml.holders(uuid)
    if not holders:
        return "and its holders cannot be seen from here"
    names = []
    for pid in holders[:8]:
        # Inside a container the driver's pids may be the host's: a number without a name is still a lead.
        try:
            name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            name = ""
        names.append(f"{pid} ({name})" if name else str(pid))
    more = f" and {len(holders) - 8} more" if len(holders) > 8 else ""
    return f"held by pid {', '.join(names)}{more}"


def _driver(device: Device, nvml: Nvml | None) -> Nvml:
    try:
        return nvml or connect()
    except NoDriver as why:
        raise MachineError(
            f"device {device.uuid} cannot be watched: NVML says {str(why)!r}", "see `coresident doctor`"
        ) from None


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / MIB:.0f} MiB"
