"""Results that others published, as an engine reads them for the lab.

An importer reads a directory and gives one `Imported` a result; the lab, which knows no engine, makes records of them.
Another package adds its own by the entry point group `coresident.importers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from coresident.errors import UserError, nearest


@dataclass(frozen=True)
class ImportedControl:
    """What was asked, what ran, and whether that is what was asked (None: the result does not say, `reason` why)."""

    name: str
    asked: Any
    ran: Any
    passed: bool | None
    reason: str = ""


@dataclass(frozen=True)
class Imported:
    """One published result.

    `parameters` are all that was asked, and `factors` those of them that tell results apart at a glance; `conditions`
    are all that could change the numbers unasked. Results that differ in either are never pooled. `metrics` give value
    and unit, all finite; in `series` None stands for a value that is no finite number. `started` is ISO 8601, `duration`
    in seconds. `status` says how the work ended; a control that failed is not to be told by it.
    """

    file: Path
    arm: str
    factors: Mapping[str, bool | int | float | str]
    parameters: Mapping[str, Any]
    conditions: Mapping[str, str]
    status: Literal["ok", "failed", "timeout", "oom", "nonfinite"]
    reason: str
    started: str
    duration: float
    metrics: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    series: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    controls: Sequence[ImportedControl] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Importer:
    """Reads a directory of published results. `read` raises `UserError` naming a file that is none, or that none is there."""

    name: str
    about: str
    workload: str
    read: Callable[[Path], Sequence[Imported]]


def importer(name: str) -> Importer:
    """The importer registered under `name`."""
    found = {point.name: point for point in entry_points(group="coresident.importers")}
    if name not in found:
        raise UserError(f"nothing is known that imports {name!r}", nearest(name, found))
    loaded = found[name].load()
    if not isinstance(loaded, Importer):
        raise UserError(
            f"the entry point of importer {name!r} is not an Importer",
            f"correct the package that declares {name!r}",
        )
    return loaded
