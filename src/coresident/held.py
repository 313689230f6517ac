"""A directory that one process writes at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from coresident.errors import MachineError

LOCK = ".lock"


@contextlib.contextmanager
def held(out: Path) -> Iterator[None]:
    """`out`, made where it is not there, as this process's own. Raises MachineError where another one trains into it, or it
    cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        # FileLock takes a file that cannot be made for one that is held.
        (out / LOCK).touch()
        lock = FileLock(out / LOCK, timeout=0)
        lock.acquire()
    except Timeout:
        raise MachineError(
            f"another process is training into {out}", "wait for it, or choose another --out"
        ) from None
    except OSError as error:
        raise MachineError(f"{out} cannot be written: {error.strerror}", "choose another --out") from None
    try:
        yield
    finally:
        lock.release()
