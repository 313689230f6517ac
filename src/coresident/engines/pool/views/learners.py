"""What a record says of each learner, wherever it comes from: its series, however the arm reported them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WORKLOADS = frozenset({"pool.dpo"})
# Imported results and smolvm's machines tell the first and the last loss only.
ENDS = "first_and_last_loss"
_SERIES = re.compile(r"learner-(\d+)\.(\w+)")
_NAMED = re.compile(r"learner (\d+): the ([\w ]+?) is (-?nan|-?inf) at step (\d+)")


@dataclass(frozen=True)
class Learner:
    """One learner of a record. `losses` are those kept, None where not finite; `steps` how many there were (None where
    only the `ends` are told).
    """

    number: int
    losses: tuple[float | None, ...]
    steps: int | None

    @property
    def broken_at(self) -> int | None:
        """The first step (from 1) whose loss is not finite, where steps are told."""
        if self.steps is None:
            return None
        return next((step for step, loss in enumerate(self.losses, start=1) if loss is None), None)


def learners(record: Mapping[str, Any]) -> list[Learner]:
    """Those of which the record has losses, by number."""
    found: dict[int, Learner] = {}
    for name, series in record.get("series", {}).items():
        told = _SERIES.fullmatch(name)
        if told is None or told[2] not in ("loss", ENDS):
            continue
        number, steps = int(told[1]), None if told[2] == ENDS else int(series["length"])
        found[number] = Learner(number, tuple(series.get("values", ())), steps)
    return [found[number] for number in sorted(found)]


def expected(record: Mapping[str, Any]) -> int | None:
    """How many learners were asked for."""
    asked = record.get("cell", {}).get("parameters", {}).get("learners")
    return asked if isinstance(asked, int) else None


def series(record: Mapping[str, Any], name: str) -> dict[int, list[float | None]]:
    """The series `name` of each learner that has it."""
    found = {}
    for key, value in record.get("series", {}).items():
        told = _SERIES.fullmatch(key)
        if told is not None and told[2] == name:
            found[int(told[1])] = list(value.get("values", ()))
    return dict(sorted(found.items()))


def named_nonfinite(reason: str) -> dict[int, dict[str, Any]]:
    """Learners whose end the record's reason tells: what was not finite, and at which step."""
    return {int(told[0]): {"what": told[1], "step": int(told[3])} for told in _NAMED.findall(reason)}


def number(value: float | None, digits: int = 4) -> str:
    """A figure for a table; what is not finite is said."""
    return "not finite" if value is None else f"{value:.{digits}f}"
