"""Reading past the page cache, and what of a file is in it: read back, never assumed.

O_DIRECT wants offsets, lengths and addresses on whole blocks. What does not lie so is read as the blocks around it into
memory of its own and copied out, so that the flag is never dropped because of an alignment.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from coresident import mincore
from coresident.errors import MachineError

BLOCK = 4096


@dataclass
class DiskFile:
    """A file opened for reading, past the page cache if `direct`. Safe to read from several threads."""

    path: Path
    direct: bool
    descriptor: int = field(init=False)
    _scratch: threading.local = field(init=False, default_factory=threading.local, repr=False)

    def __post_init__(self) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
        try:
            self.descriptor = os.open(self.path, flags)
        except OSError as error:
            raise self._refused(error) from None

    @property
    def is_direct(self) -> bool:
        """Whether reads go past the page cache, as the kernel says it."""
        return bool(fcntl.fcntl(self.descriptor, fcntl.F_GETFL) & os.O_DIRECT)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`. Raises MachineError where the file ends before or the read fails."""
        if not self.direct or (
            offset % BLOCK == 0 and len(into) % BLOCK == 0 and _address(into) % BLOCK == 0
        ):
            self._read(offset, into, len(into))
            return
        first = offset // BLOCK * BLOCK
        wanted = offset + len(into) - first
        blocks = self._blocks(-(-wanted // BLOCK) * BLOCK)
        self._read(first, blocks, wanted)
        into[:] = blocks[offset - first : wanted]

    def close(self) -> None:
        """Close it; nothing may be reading."""
        os.close(self.descriptor)

    def _read(self, offset: int, into: memoryview, needed: int) -> None:
        done = 0
        while done < needed:
            try:
                got = os.preadv(self.descriptor, [into[done:]], offset + done)
            except OSError as error:
                raise self._refused(error) from None
            if not got:
                raise MachineError(
                    f"{self.path} ended at byte {offset + done}, before what should be read",
                    "leave the file alone while it is in use",
                )
            done += got

    def _blocks(self, size: int) -> memoryview:
        held: mmap.mmap | None = getattr(self._scratch, "held", None)
        if held is None or len(held) < size:
            held = self._scratch.held = mmap.mmap(-1, size)
        return memoryview(held)[:size]

    def _refused(self, error: OSError) -> MachineError:
        if self.direct and error.errno == 22:
            return MachineError(
                f"the filesystem of {self.path} has no O_DIRECT ({error.strerror})",
                "keep the file on ext4 or xfs, or read through the page cache (tier: page-cache)",
            )
        return MachineError(f"{self.path} cannot be read ({error.strerror})", "check the disk it lies on")


def cached(files: Iterable[Path]) -> float:
    """The share of the files' pages that are in the page cache (mincore)."""
    pages = present = 0
    for file in files:
        try:
            with file.open("rb") as stream:
                found = mincore.resident(stream.fileno())
        except OSError as error:
            raise MachineError(f"{file} cannot be mapped ({error.strerror})", "use tier: pinned") from None
        pages += len(found)
        present += sum(value & 1 for value in found)
    return present / pages if pages else 0.0


def drop(files: Iterable[Path]) -> None:
    """Ask the kernel to forget the files' pages; `cached` says whether it did."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # A dirty page is not dropped.
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm(files: Iterable[Path]) -> None:
    """Read the files through the page cache."""
    buffer = bytearray(1 << 23)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
