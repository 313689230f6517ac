"""The doctor's questions about the host: processors, memory, kernel."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from coresident import available, cgroup
from coresident.lab.run.doctor.finding import Finding, bad, ok, warn
from coresident.lab.run.machine import cores, host, processes
from coresident.lab.run.machine.devices import cpu_model

PR_GET_CHILD_SUBREAPER = 37
TRUSTED_CLOCKS = frozenset({"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"})


def findings() -> Iterator[Finding]:
    """All findings about the host."""
    allowed = cores.allowed()
    yield processors(allowed, cgroup.limits().cpus, os.cpu_count() or len(allowed))
    yield memory(available.memory(), cgroup.limits().memory)
    yield load(os.getloadavg()[0], len(allowed))
    yield swap(host.read("/proc/swaps"))
    yield governor(host.governor())
    yield hugepages(host.chosen("/sys/kernel/mm/transparent_hugepage/enabled"))
    yield clock_source(host.read("/sys/devices/system/clocksource/clocksource0/current_clocksource").strip())
    yield clocks()
    yield smaps()
    yield subreaper()
    yield shared_memory()


def processors(allowed: list[int], quota: float | None, present: int) -> Finding:
    """How many cores can really be used, and why not all."""
    said = f"{cpu_model()}: {len(allowed)} of {present} cores allowed"
    if quota is None or quota >= len(allowed):
        return ok(said)
    there = cores.usable(allowed, quota)
    text = f"{said}, and a cgroup's quota gives {quota:g} cores' worth of time"
    if there == 0:
        return warn(text, "raise the quota to one core at least: pinned cells cannot run")
    return warn(
        text,
        f"ask for {there} cores at most, or raise the quota: above it the kernel stops the cell for moments",
    )


def memory(free: int, limit: int | None) -> Finding:
    """Memory that a cell can have now."""
    said = f"{free / 2**30:.1f} GiB of memory are free"
    if limit is not None:
        said += f", within a cgroup's limit of {limit / 2**30:.1f} GiB"
    if free < 2 * 2**30:
        return warn(said, "end other programs, or raise the limit: PyTorch alone takes half a GiB a process")
    return ok(said)


def load(average: float, allowed: int) -> Finding:
    """Is somebody else working here?"""
    said = f"load average {average:.2f} over the last minute on {allowed} cores"
    if average > max(0.5, 0.1 * allowed):
        return warn(said, "wait, or end what runs: foreign load leaves `exclusive-device` unverified")
    return ok(said)


def swap(swaps: str) -> Finding:
    """Swapped pages vanish from a cell's memory and come back as time."""
    if len(swaps.splitlines()) > 1:
        return warn(
            "swap is on", "swapoff -a while measuring: swapped pages are missing from peaks, and cost time"
        )
    return ok("swap is off")


def governor(chosen: str) -> Finding:
    """A governor that follows the load makes the first moments of a cell slower."""
    if not chosen:
        return ok("CPU frequency is not shown to this machine (as in most virtual ones)")
    if set(chosen.split(",")) <= {"performance"}:
        return ok("CPU frequency governor: performance")
    return warn(f"CPU frequency governor: {chosen}", "cpupower frequency-set -g performance")


def hugepages(chosen: str) -> Finding:
    """With `always`, resident memory grows by whole 2 MiB pages, by chance of alignment."""
    if chosen == "always":
        return warn(
            "transparent huge pages: always",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (steadier memory peaks)",
        )
    return ok(f"transparent huge pages: {chosen or 'not in this kernel'}")


def clock_source(name: str) -> Finding:
    """Some clock sources cost a microsecond a look, or jump."""
    if name and name not in TRUSTED_CLOCKS:
        return warn(f"clock source {name}", "prefer tsc or the hypervisor's own: this one is slow to read")
    return ok(f"clock source {name or 'unknown'}")


def clocks(
    wall: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
    pause: float = 0.05,
) -> Finding:
    """Do both clocks run, and equally fast?"""
    first = wall(), monotonic()
    time.sleep(pause)
    second = wall(), monotonic()
    passed, difference = second[1] - first[1], (second[0] - first[0]) - (second[1] - first[1])
    if passed <= 0:
        return bad(
            "the monotonic clock does not advance",
            "repair the machine's clock source: no duration can be trusted",
        )
    if abs(difference) > 0.01:
        return warn(
            f"the wall clock ran {1000 * difference:+.0f} ms off the monotonic one in {1000 * passed:.0f} ms",
            "let the clock settle (NTP): durations do not use it, dates do",
        )
    return ok("wall and monotonic clocks agree")


def smaps(pid: int | None = None) -> Finding:
    """Memory peaks of cells are sums of PSS, which the kernel must let us read."""
    found = processes.footprint(os.getpid() if pid is None else pid)
    if found is None or found.pss is None:
        return bad(
            "/proc/<pid>/smaps_rollup cannot be read, so memory of cells cannot be measured",
            "use Linux 4.14 or newer with /proc mounted and ptrace permitted for one's own processes",
        )
    return ok("proportional memory (PSS) of processes can be read")


def subreaper() -> Finding:
    """The shim adopts what a cell leaves behind; without that, orphans would outlive it."""
    flag = ctypes.c_int()
    done = ctypes.CDLL(None, use_errno=True).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(flag), 0, 0, 0)
    if done != 0:
        return bad(
            f"this system refuses to adopt orphans ({os.strerror(ctypes.get_errno())})",
            "permit prctl(PR_SET_CHILD_SUBREAPER) in the container's seccomp profile",
        )
    return ok("orphans of a cell can be adopted (subreaper)")


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:  # noqa: S108 - the kernel's own, only looked at
    """PyTorch's data loaders and multiprocessing need room there; containers give 64 MiB."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return warn(f"{folder} is not there", "mount a tmpfs on it: multiprocessing needs it")
    size = found.f_frsize * found.f_blocks
    if size < 2**30:
        return warn(
            f"{folder} holds {size / 2**20:.0f} MiB", "start the container with --shm-size=8g or --ipc=host"
        )
    return ok(f"{folder} holds {size / 2**30:.1f} GiB")
