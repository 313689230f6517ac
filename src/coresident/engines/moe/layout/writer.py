"""Writes a file of expert records; goes on where it was interrupted.

The file grows under another name beside its own. A record's checksum is written once its bytes are on disk, so that whatever
has a checksum that fits is not written again; the file gets its name when all have.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from torch import Tensor

from coresident import whole
from coresident.engines.moe.layout.file import DIGEST, Header, LayoutFile, open_layout, opened, read_header
from coresident.engines.moe.layout.record import RecordFormat
from coresident.errors import MachineError, UserError

# Records between two waits for the disk.
BATCH = 32


class Origin(Protocol):
    """Where a model's expert weights come from."""

    @property
    def identity(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def experts(self) -> int: ...

    def expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """gate [I, H], up [I, H], down [H, I]."""
        ...


def write(
    origin: Origin, form: RecordFormat, out: Path, progress: Callable[[int, int], None] = lambda *_: None
) -> LayoutFile:
    """Write all of the origin's experts to `out`, or what an interrupted call left to do.

    Raises UserError where `out` is another model's or form's, MachineError where it cannot be written.
    """
    header = Header(origin.identity, origin.layers, origin.experts, form)
    aside = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        while not out.exists():
            with opened(aside, os.O_RDWR | os.O_CREAT) as file:
                # Another process may be writing it: then it is waited for. The growing file is its own lock, so that none
                # stays beside.
                fcntl.flock(file, fcntl.LOCK_EX)
                if not _names(aside, file):
                    continue
                if out.exists():
                    # It got its name between the look for it and the opening, which made an empty one.
                    aside.unlink()
                    break
                _written(origin, header, aside, file, progress)
                aside.rename(out)
                whole.sync(out.parent)
    except OSError as error:
        raise MachineError(
            f"{out} cannot be written ({error.strerror}; {header.size:,} bytes are needed)",
            "free space there, or choose another place; the same command goes on",
        ) from None
    # It may be another process's, which was waited for.
    _same(out, header)
    return open_layout(out)


def _names(path: Path, file: int) -> bool:
    """Whether `path` is the open file's name, and not that of another or of none."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _written(
    origin: Origin, header: Header, aside: Path, file: int, progress: Callable[[int, int], None]
) -> None:
    if os.fstat(file).st_size:
        _same(aside, header)
    if os.fstat(file).st_size != header.size:
        # The header first: a file of that size without one could not be gone on with.
        os.pwrite(file, header.encode(), 0)
        os.posix_fallocate(file, 0, header.size)
    _fill(origin, header, file, progress)


def _fill(origin: Origin, header: Header, file: int, progress: Callable[[int, int], None]) -> None:
    keys = [(layer, expert) for layer in range(header.layers) for expert in range(header.experts)]
    written: list[tuple[tuple[int, int], bytes]] = []

    def settle() -> None:
        os.fdatasync(file)
        for key, digest in written:
            os.pwrite(file, digest, header.digest_offset(*key))
        written.clear()

    for number, key in enumerate(keys):
        if not _done(file, header, key):
            record = header.form.encode(*origin.expert(*key)).numpy().tobytes()
            _write_all(file, record, header.offset(*key))
            written.append((key, hashlib.sha256(record).digest()))
            if len(written) == BATCH:
                settle()
        progress(number + 1, len(keys))
    settle()
    os.fsync(file)


def _done(file: int, header: Header, key: tuple[int, int]) -> bool:
    digest = os.pread(file, DIGEST, header.digest_offset(*key))
    if not any(digest):
        return False
    return hashlib.sha256(os.pread(file, header.form.size, header.offset(*key))).digest() == digest


def _write_all(file: int, record: bytes, offset: int) -> None:
    done = 0
    while done < len(record):
        done += os.pwrite(file, record[done:], offset + done)


def _same(path: Path, header: Header) -> None:
    found = read_header(path, "choose another OUT, or remove it: it is not overwritten")
    if found != header:
        what = "another model" if found.model != header.model else f"another form ({found.form.encoding})"
        raise UserError(f"{path} is a layout of {what}", "choose another OUT, or remove it")
