"""In which state the base's files are read: from the page cache or from the disk, arranged and verified.

The kernel may keep a page that it was advised to drop (it is dirty, or mapped elsewhere), so mincore decides
what was had. Needs no torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from coresident import mincore
from coresident.engines.pool.sharing.sharing import Decision
from coresident.errors import MachineError

# Files share pages with nobody, but a few pages may come or go while we look.
TOLERANCE = 0.01
READ = 1 << 23
RAW_LIMIT = 2 << 30


def arrange(files: Iterable[Path], asked: str) -> float:
    """Bring the files into the state `asked` (`keep`, `warm`, `cold`); the share of their pages now in memory.

    Raises MachineError for a file that cannot be read.
    """
    files = list(files)
    for file in files:
        with _opened(file) as descriptor:
            if asked == "warm":
                _read_through(descriptor)
            elif asked == "cold":
                # A dirty page is not dropped.
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return resident(files)


def resident(files: Iterable[Path]) -> float:
    """The share of the files' pages that are in the page cache (mincore)."""
    pages = present = 0
    for file in files:
        with _opened(file) as descriptor:
            try:
                found = mincore.resident(descriptor)
            except OSError as error:
                raise MachineError(
                    f"{file} cannot be mapped ({error.strerror})", "set page_cache: keep"
                ) from None
            pages += len(found)
            present += sum(value & 1 for value in found)
    return present / pages if pages else 1.0


def decide(asked: str, share: float) -> Decision:
    """Whether the state was had."""
    if asked == "cold" and share > TOLERANCE:
        return Decision(False, f"{100 * share:.1f} % of the base's pages were still in memory")
    if asked == "warm" and share < 1 - TOLERANCE:
        return Decision(False, f"only {100 * share:.1f} % of the base's pages were in memory")
    return Decision(True, "")


def raw_rate(file: Path) -> float | None:
    """Bytes a second that the disk gives of this file, past the page cache (O_DIRECT); None where it has no such way."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # An anonymous mapping is aligned as O_DIRECT wants it.
        with mmap.mmap(-1, READ) as buffer:
            got, start = 0, time.monotonic()
            while got < RAW_LIMIT:
                count = os.preadv(descriptor, [buffer], got)
                got += count
                if count < READ:
                    break
            seconds = time.monotonic() - start
        return got / seconds if got and seconds > 0 else None
    except OSError:
        return None
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[int]:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise MachineError(f"{file} cannot be read ({error.strerror})", "check the disk it lies on") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_through(descriptor: int) -> None:
    buffer = bytearray(READ)
    at = 0
    while count := os.preadv(descriptor, [buffer], at):
        at += count
