"""Is this machine fit to measure on? Every finding comes with its remedy; nothing is changed and no context
is created."""

from __future__ import annotations

import contextlib
import locale
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from coresident.errors import MachineError
from coresident.lab.run import locks, preflight
from coresident.lab.run.doctor import checks_card, checks_host
from coresident.lab.run.doctor.finding import Finding, bad, ok, warn
from coresident.lab.run.machine import environment, git, host
from coresident.lab.run.machine.nvml import Nvml

TORCH = ((2, 11), (2, 15))
MPS_SOCKET = "nvidia-mps/control_privileged"
LONGEST_SOCKET = 108


def findings(run: Path | None = None, nvml: Nvml | None = None) -> list[Finding]:
    """All findings, in the order in which a reader asks. `run` is where run directories will be (default:
    here)."""
    place = run or Path.cwd()
    return [
        python(),
        torch(host.packages()),
        *checks_host.findings(),
        *checks_card.findings(nvml),
        *variables(os.environ),
        *disk(place),
        device_locks(),
        temporary(Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", tempfile.gettempdir()))),
        decimal_point(),
        repository(place),
    ]


def exit_status(found: Sequence[Finding]) -> int:
    """0 if nothing is bad, else 2."""
    return 2 if any(finding.level == "bad" for finding in found) else 0


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """Is this Python new enough?"""
    said = f"Python {'.'.join(map(str, version))} at {sys.executable}"
    if version < (3, 11):
        return bad(said, "use Python 3.11 or newer")
    return ok(said)


def torch(packages: Mapping[str, str]) -> Finding:
    """The installed PyTorch, from its metadata: importing it would take a second, and the lab never does."""
    version = packages.get("torch")
    if version is None:
        return bad("PyTorch is not installed", "pip install 'torch>=2.11,<2.15'")
    numbers = tuple(int(part) for part in version.partition("+")[0].split(".")[:2] if part.isdigit())
    if not TORCH[0] <= numbers < TORCH[1]:
        return warn(f"PyTorch {version} is not among the tested versions", "pip install 'torch>=2.11,<2.15'")
    return ok(f"PyTorch {version}")


def variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that change how a cell runs: they are part of its conditions, so set them on purpose or not
    at all."""
    found = environment.variables(environ)
    if found:
        listed = ", ".join(f"{name}={value}" for name, value in sorted(found.items()))
        yield warn(
            f"the environment changes how cells run: {listed}",
            "unset what you did not mean: these are part of every record's conditions",
        )
    else:
        yield ok("no environment variable changes threads, kernels or allocation")


def disk(place: Path) -> Iterator[Finding]:
    """Free space where records go, and what a durable write costs there."""
    here = preflight.standing(place)
    try:
        free = shutil.disk_usage(here).free
        seconds = _fsync_seconds(here)
    except OSError as error:
        yield bad(f"{place} cannot be written: {error.strerror}", "choose a writable directory by --out")
        return
    said = f"{free / 2**30:.1f} GiB free at {place}"
    if free < 2**30:
        yield warn(said, "free some: a full disk ends a run (losing nothing that is recorded)")
    else:
        yield ok(said)
    said = f"a durable write at {place} takes {1000 * seconds:.1f} ms"
    if seconds > 0.1:
        yield warn(said, "put runs on a local disk: each record waits for a few such writes")
    else:
        yield ok(said)


def _fsync_seconds(folder: Path) -> float:
    """The median of five small writes with fsync."""
    took = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(5):
            start = time.monotonic()
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            took.append(time.monotonic() - start)
    return sorted(took)[2]


def device_locks() -> Finding:
    """Can labs of all users wait for one another?"""
    try:
        directory = locks.lock_directory()
    except MachineError as error:
        return bad(error.problem, error.remedy)
    if not os.access(directory, os.W_OK | os.X_OK):
        return bad(
            f"device locks cannot be made in {directory}", f"set {locks.DIRECTORY} to a writable directory"
        )
    return ok(f"device locks are in {directory}")


def temporary(folder: Path) -> Finding:
    """A socket's path must fit into 108 bytes: CUDA's MPS server and multiprocessing fail in longer ones,
    saying little."""
    length = len(os.fsencode(folder / MPS_SOCKET)) + 1
    if length > LONGEST_SOCKET:
        return warn(
            f"temporary folder {folder} is too long for sockets"
            f" ({length} of {LONGEST_SOCKET} bytes with MPS's names)",
            "set TMPDIR, or CUDA_MPS_PIPE_DIRECTORY, to a short path such as /tmp",
        )
    return ok(f"temporary folder {folder} is short enough for sockets")


def decimal_point() -> Finding:
    """Programs that follow the locale may print 1,5 for 1.5, and that is no number to the lab."""
    before = locale.setlocale(locale.LC_NUMERIC)
    mark = "."
    # A locale that is not installed leaves programs with the point.
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_NUMERIC, "")
        mark = str(locale.localeconv()["decimal_point"])
    locale.setlocale(locale.LC_NUMERIC, before)
    if mark != ".":
        return warn(
            f"this locale's decimal mark is {mark!r}: numbers so written by programs will be refused",
            "export LC_NUMERIC=C.UTF-8",
        )
    return ok("the locale's decimal mark is a point")


def repository(place: Path) -> Finding:
    """Will records say from which source they come?"""
    found = git.state(place if place.is_dir() else Path.cwd())
    if found.why:
        return warn(
            f"git: {found.why}", "measure from within a git repository, so that records name the commit"
        )
    if found.dirty:
        return warn(
            f"git: commit {found.commit[:12]} with changes to {len(found.changed)} tracked files",
            "commit before a measurement to be published",
        )
    return ok(f"git: commit {found.commit[:12]}, clean")
