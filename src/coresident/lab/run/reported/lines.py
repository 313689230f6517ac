"""Reads a file of events line by line: sizes are bounded, JSON is strict, a torn tail is told apart."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_LIMIT = 64 * 2**20
LINE_LIMIT = 2**20
SERIES_LIMIT = 16 * 2**20

_DECIMAL_COMMA = re.compile(rb'":\s*-?\d+,\d+\s*[,}]')


@dataclass(frozen=True)
class Line:
    """One line: the object it holds, or why it cannot be read; `torn` where it just ends too early."""

    number: int
    value: dict[str, Any] | None = None
    fault: str = ""
    torn: bool = False


def lines(path: Path) -> Iterator[Line]:
    """The lines of an events file, without blank ones.

    Reading ends at the first that cannot be told from the next. Non-finite numbers (`NaN`, `Infinity`,
    `1e400`) come out as such floats: what they mean depends on the event.
    """
    try:
        # Neither a link out of the directory, nor a named pipe that would keep us waiting.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        yield Line(0, fault=f"cannot be read: {error.strerror}")
        return
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        os.close(descriptor)
        yield Line(0, fault="is not a regular file")
        return
    with os.fdopen(descriptor, "rb") as file:
        if about.st_size > FILE_LIMIT:
            yield Line(0, fault=f"is larger than {FILE_LIMIT >> 20} MiB")
            return
        number = 0
        while raw := file.readline(SERIES_LIMIT + 1):
            number += 1
            if len(raw) > SERIES_LIMIT:
                yield Line(number, fault=f"is longer than {SERIES_LIMIT >> 20} MiB")
                return
            if raw.strip():
                yield _parsed(number, raw)


def _parsed(number: int, raw: bytes) -> Line:
    whole = raw.endswith(b"\n")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except UnicodeDecodeError:
        return Line(number, fault="is not UTF-8", torn=not whole)
    except _Duplicate as twice:
        return Line(number, fault=f"has the key {str(twice)!r} twice")
    except (ValueError, RecursionError) as error:
        if _DECIMAL_COMMA.search(raw):
            return Line(
                number,
                fault="is not JSON: a number with a decimal comma (write a point, whatever the locale)",
            )
        what = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        return Line(number, fault=f"is not JSON: {what}", torn=not whole)
    if not isinstance(value, dict):
        return Line(number, fault="is not a JSON object")
    # A whole object that merely lacks its newline is taken: one that was cut short is never valid JSON.
    if len(raw) > LINE_LIMIT and value.get("event") != "series":
        return Line(number, fault=f"is longer than {LINE_LIMIT >> 20} MiB, which only a series may be")
    return Line(number, value=value)


class _Duplicate(Exception):  # noqa: N818 - carries a key, never reaches a user
    pass


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise _Duplicate(name)
        values[name] = value
    return values
