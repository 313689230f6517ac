"""Locks between labs: one lab in a run directory, one cell on a device. The kernel frees them when their
holder dies.

The lock itself is `flock` on a file that stays; who holds it is written beside it, for
messages only, since the number of a dead process may stand there until the next holder writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from coresident.errors import MachineError
from coresident.lab.run.machine.devices import Device

DIRECTORY = "CORESIDENT_LOCKS"
_POLL = 0.1


class RunLock:
    """Holds a run directory for one lab: `with RunLock(run):`. Entering raises `MachineError` if another
    lab holds it."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._holder = run / "lock.holder"
        self._lock = FileLock(run / "lock", mode=0o644)

    def __enter__(self) -> RunLock:
        try:
            self.run.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout:
            raise MachineError(
                f"{self.run} is in use by another lab, {_held_by(self._holder)}",
                "wait for it to end, or use another --out",
            ) from None
        except OSError as error:
            raise MachineError(
                f"cannot lock {self.run}: {error.strerror}", "choose a writable directory by --out"
            ) from None
        _note(self._holder, 0o644, _me())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _note(self._holder, 0o644, "")
        self._lock.release()


@contextlib.contextmanager
def device_lock(
    device: Device,
    waiting: Callable[[str], None] | None = None,
    give_up: Callable[[], bool] | None = None,
) -> Iterator[int]:
    """Hold a device among all labs of all users on this host, waiting for it as long as needed.

    Gives the lock's descriptor: what else has it open (the shim of a running cell) holds the lock as well.

    `waiting` is told once who holds it, and again when that changes. Once `give_up` answers true while
    waiting, `MachineError` is raised.
    """
    directory = lock_directory()
    name = re.sub(r"[^A-Za-z0-9.-]", "_", device.uuid)
    holder = directory / f"{name}.holder"
    path, told = directory / f"{name}.lock", ""
    while (held := _take(path)) is None:
        message = f"waiting for {device.uuid}, {_held_by(holder)}"
        if waiting is not None and message != told:
            waiting(message)
            told = message
        if give_up is not None and give_up():
            raise MachineError(f"stopped while {message}", "run again when the device is free")
        time.sleep(_POLL)
    try:
        _note(holder, 0o666, _me())
        yield held
    finally:
        _note(holder, 0o666, "")
        os.close(held)


def _take(path: Path) -> int | None:
    """The descriptor that holds the lock at `path`, None while another process holds it.

    Not filelock: in a sticky directory it refuses (from version 4) a file that another user made, and users
    who share a card are whom this lock is for. They trust one another not to replace it.
    """
    try:
        descriptor = _open(path, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Someone may have cleared the directory between our open and our lock: then nobody else sees
            # this one.
            if os.path.samestat(os.fstat(descriptor), path.lstat()):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
    except (BlockingIOError, FileNotFoundError):
        return None
    except OSError as error:
        raise MachineError(
            f"cannot lock {path}: {error.strerror}",
            f"make that file writable for all users, or set {DIRECTORY} to a directory of your own",
        ) from None
    os.close(descriptor)
    return None


def _open(path: Path, mode: int) -> int:
    """Open a file for writing that any user may write, making it if need be; no link is followed, no pipe
    waited for.

    In a sticky directory the kernel may refuse O_CREAT on another user's file, so opening and making are
    two steps.
    """
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        pass
    try:
        made = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return os.open(path, flags)
    # The umask cuts what open gives.
    os.fchmod(made, mode)
    return made


def lock_directory() -> Path:
    """Where devices' locks are: $CORESIDENT_LOCKS, or one directory for all users of this host.

    As /tmp itself, the shared one is writable for all and sticky, so that no user can remove or rename
    another's locks. A link in its place, or a directory that its owner alone could rearrange, is refused.
    """
    chosen = os.environ.get(DIRECTORY)
    if chosen:
        directory = Path(chosen)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MachineError(
                f"cannot create {DIRECTORY}={chosen}: {error.strerror}", "set it to a writable directory"
            ) from None
        return directory
    return _shared(Path("/tmp/coresident-locks"))  # noqa: S108 - one well-known place, checked below


def _shared(directory: Path) -> Path:
    try:
        directory.mkdir(mode=0o700)
        # mkdir's own mode is cut by the umask.
        directory.chmod(0o1777)
    except FileExistsError:
        pass
    except OSError as error:
        raise MachineError(
            f"cannot create {directory}: {error.strerror}", f"set {DIRECTORY} to a writable directory"
        ) from None
    found = directory.lstat()
    open_to_all = stat.S_IMODE(found.st_mode) == 0o1777
    # Another lab may be between its mkdir and its chmod.
    if stat.S_ISDIR(found.st_mode) and not open_to_all:
        time.sleep(0.05)
        found = directory.lstat()
        open_to_all = stat.S_IMODE(found.st_mode) == 0o1777
    if not stat.S_ISDIR(found.st_mode) or not open_to_all:
        raise MachineError(
            f"{directory} is no directory that all users share (mode 1777)",
            f"remove it, or set {DIRECTORY} to a directory of your own",
        )
    return directory


def _note(path: Path, mode: int, text: str) -> None:
    """Write who holds the lock. A note that cannot be written is no reason to stop: the lock is held."""
    with contextlib.suppress(OSError):
        descriptor = _open(path, mode)
        try:
            # A second name of the file may be someone's trap: what it holds is not ours to cut.
            if os.fstat(descriptor).st_nlink == 1:
                os.ftruncate(descriptor, 0)
                os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def _me() -> str:
    return f"{os.getpid()} {socket.gethostname()}\n"


def _held_by(holder: Path) -> str:
    """In words, who holds a lock that was just found taken; its holder may be about to write."""
    for _ in range(5):
        try:
            # Anyone may have put anything in a shared directory: no link is followed, no pipe waited for.
            descriptor = os.open(holder, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                pid, host = os.read(descriptor, 400).decode().split()
                int(pid)
            finally:
                os.close(descriptor)
        except (OSError, ValueError):
            time.sleep(0.02)
            continue
        if host != socket.gethostname():
            return f"held by pid {pid} on {host}"
        if Path(f"/proc/{pid}").exists():
            return f"held by pid {pid}"
        time.sleep(0.02)
    return "held by a process that cannot be seen from here"
