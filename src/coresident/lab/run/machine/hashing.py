"""Hashes of files and folders, taken once while the file stays as it is (same place, inode, size and time
of change)."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

# Above this a file is known by its length and its two ends: reading tens of GB before every run would be
# its own load.
WHOLE = 2 * 2**30
_EDGE = 16 * 2**20


def of(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes, or of a folder's names and files; `edges:` before it for a file
    above 2 GiB.

    `missing` for what is not there, `unreadable` for what may not be read: a fact to record, not an error
    here.
    """
    try:
        if path.is_dir():
            return tree(path)
        found = path.stat()
        return _file(str(path.resolve()), found.st_ino, found.st_size, found.st_mtime_ns)
    except FileNotFoundError:
        return "missing"
    except OSError:
        return "unreadable"


def tree(folder: Path, wanted: Callable[[str], bool] = lambda _: True) -> str:
    """One hash over the relative names and contents of all files below `folder` whose name is `wanted`."""
    total = hashlib.sha256()
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(filter(wanted, names)):
            path = Path(place, name)
            line = f"{path.relative_to(folder).as_posix()}\0{of(path)}\n"
            total.update(line.encode("utf-8", "surrogateescape"))
    return total.hexdigest()


@functools.lru_cache(maxsize=10_000)
def _file(path: str, inode: int, size: int, changed: int) -> str:
    del inode, changed  # they only key the cache
    with Path(path).open("rb") as file:
        if size <= WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        ends = hashlib.sha256(f"{size}\n".encode())
        ends.update(file.read(_EDGE))
        file.seek(size - _EDGE)
        ends.update(file.read(_EDGE))
        return f"edges:{ends.hexdigest()}"
