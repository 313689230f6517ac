"""What an engine can show of its own records, beyond what the lab shows of any.

A view takes records as their files hold them and gives data, and tables of that data. Another package adds its own by
the entry point group `coresident.views`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from coresident.errors import UserError, nearest


@dataclass(frozen=True)
class Seen:
    """A record (the content of its file), its name, and the directory of its attempt (None where only records are)."""

    id: str
    record: Mapping[str, Any]
    retracted: bool
    place: Path | None


@dataclass(frozen=True)
class ViewTable:
    """Rows of text under headers; `numbers` are the indices of the columns that hold numbers."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    numbers: frozenset[int] = frozenset()


@dataclass(frozen=True)
class View:
    """`data` gives one JSON value a record, `tables` shows such values; `workloads` are those whose records it can read."""

    name: str
    about: str
    workloads: frozenset[str]
    data: Callable[[Sequence[Seen]], list[dict[str, Any]]]
    tables: Callable[[Sequence[Mapping[str, Any]]], Sequence[ViewTable]]


def view(name: str) -> View:
    """The view registered under `name`."""
    found = {point.name: point for point in entry_points(group="coresident.views")}
    if name not in found:
        raise UserError(f"there is no view {name!r}", nearest(name, found))
    loaded = found[name].load()
    if not isinstance(loaded, View):
        raise UserError(
            f"the entry point of view {name!r} is not a View", f"correct the package that declares {name!r}"
        )
    return loaded
