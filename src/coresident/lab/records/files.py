"""All writing of results goes through here, so that a file is there whole or not at all, whatever dies when.

A file is written aside in the same directory, flushed to the disk, and only then given its name: by a link
where nothing may be replaced, by a rename where the newest content counts. What a killed writer leaves
aside is ignored by readers and swept by the next run; a lock on each such file tells a dead writer's from a
living one's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from coresident.errors import MachineError

ASIDE = ".aside-"


class Disk:
    """The one place that touches the file system for writing. Each step is a method, so that a test can
    stop at any.
    """

    def publish(self, path: Path, content: bytes) -> None:
        """Write a new file. Raises `FileExistsError` (and leaves what is there) if `path` exists,
        `MachineError` if not possible.
        """
        with _explained(path):
            with self._aside(path, content) as aside:
                try:
                    self.link(aside, path)
                except FileExistsError:
                    raise FileExistsError(f"{path} exists already") from None
                self.unlink(aside)
            self.sync_directory(path.parent)

    def replace(self, path: Path, content: bytes) -> None:
        """Write a file in place of what is there, if anything. Readers see the old or the new content,
        never a mixture.
        """
        with _explained(path):
            with self._aside(path, content) as aside:
                self.rename(aside, path)
            self.sync_directory(path.parent)

    def directory(self, path: Path) -> None:
        """Make a directory and its parents, durable; nothing happens if it is there."""
        if path.is_dir():
            return
        with _explained(path):
            missing = [one for one in (path, *path.parents) if not one.exists()]
            path.mkdir(parents=True, exist_ok=True)
            for one in missing:
                self.sync_directory(one.parent)

    def sweep(self, directory: Path) -> list[Path]:
        """Remove what killed writers left aside in a directory (not below it); returns what was removed."""
        removed = []
        for path in sorted(directory.glob(f"{ASIDE}*")) if directory.is_dir() else []:
            with _explained(path), contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                self.unlink(path)
                removed.append(path)
        return removed

    @contextlib.contextmanager
    def _aside(self, path: Path, content: bytes) -> Iterator[Path]:
        aside, descriptor = self._new(path)
        try:
            try:
                rest = memoryview(content)
                while rest:
                    rest = rest[self.write(descriptor, rest) :]
                self.sync(descriptor)
                # The lock lives as long as the descriptor: until the file has its name, or was given up.
                yield aside
            finally:
                os.close(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise

    def _new(self, path: Path) -> tuple[Path, int]:
        while True:
            aside = path.parent / f"{ASIDE}{secrets.token_hex(8)}"
            descriptor = self.create(aside)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A sweeper may have come between creation and lock.
                if os.fstat(descriptor).st_nlink == 1:
                    return aside, descriptor
            os.close(descriptor)

    def create(self, aside: Path) -> int:
        """Open a new file for writing; returns its descriptor."""
        return os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, content: memoryview) -> int:
        """Write some of `content`; returns how many bytes."""
        return os.write(descriptor, content)

    def sync(self, descriptor: int) -> None:
        """Wait until the content is on the disk."""
        os.fsync(descriptor)

    def link(self, aside: Path, path: Path) -> None:
        """Give the file its name, unless the name is taken (`FileExistsError`)."""
        os.link(aside, path)

    def rename(self, aside: Path, path: Path) -> None:
        """Give the file its name, whatever had it before."""
        aside.replace(path)

    def unlink(self, aside: Path) -> None:
        """Remove the name that the file had aside."""
        aside.unlink()

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in a directory are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn the system's errors into ours; `FileExistsError` passes, being an answer."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        if error.errno in _FULL:
            remedy = "free space there and repeat the command: what was written before is kept"
        elif error.errno in _FORBIDDEN:
            remedy = "make it writable (on a file system that has hard links), or choose another --out"
        else:
            remedy = "choose another --out"
        raise MachineError(f"cannot write {path}: {reason}", remedy) from error
