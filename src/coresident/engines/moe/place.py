"""A new directory that appears whole or not at all, in a place that is known to take it before the work starts."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coresident.errors import MachineError, UserError


def require(out: Path) -> None:
    """Raises UserError where `out` is there already, MachineError where it could not be made. Leaves nothing behind."""
    if os.path.lexists(out):
        raise UserError(f"{out} is already there", "remove it, or choose another directory")
    parent = next(one for one in out.absolute().parents if os.path.lexists(one))
    try:
        # Permissions alone do not say it: root passes them, and a filesystem may be read-only.
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=parent):
            pass
    except OSError as error:
        raise _refused(out, error) from None


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """A directory to fill that becomes `out` at the end, or is gone. Raises what `require` raises."""
    require(out)
    aside = out.parent / f".{out.name}.aside-{os.getpid()}"
    try:
        aside.mkdir(parents=True)
        yield aside
        aside.rename(out)
    except OSError as error:
        raise _refused(out, error) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _refused(out: Path, error: OSError) -> MachineError:
    return MachineError(
        f"{out} cannot be written: {error.strerror or error}",
        "see to space and permissions there, or choose another place",
    )
