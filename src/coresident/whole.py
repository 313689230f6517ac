"""What is written is there whole, as it was or as it is to be, whatever happens while it is written."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from coresident.errors import MachineError


def write(file: Path, text: str) -> None:
    """Write a text file, or leave the one that is there. Raises MachineError where the disk does not take it."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(file)
    except OSError as error:
        raise MachineError(f"{file} cannot be written: {error.strerror}", "free space there") from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def write_json(file: Path, value: Any) -> None:
    """The same of a JSON document without NaN or infinities."""
    write(file, json.dumps(value, indent=1, allow_nan=False) + "\n")


def sync(path: Path) -> None:
    """Have the disk hold a file's bytes, or a directory's names, before anything that relies on them is done."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
