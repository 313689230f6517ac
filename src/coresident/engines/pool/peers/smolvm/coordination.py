"""The files by which golden, clones and host agree, in a directory that all of them see.

The golden machine writes `golden_ready` (its load in ms); the host touches `go`; each clone takes a number by creating
`claim_K` and appends to `learner_K.jsonl` an event `ready`, then `done`. A torn last line is not read yet; NaN is.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Done:
    """What a clone said at its end: seconds of training, ms a step, first and last logged loss, peak in GB.

    `tokens` are real tokens where its script counts them (the published one does not).
    """

    seconds: float
    step_ms: float
    first_loss: float
    last_loss: float
    peak_gb: float | None
    tokens: int | None

    @property
    def finite(self) -> bool:
        """Whether both losses are numbers."""
        return math.isfinite(self.first_loss) and math.isfinite(self.last_loss)


class Coordination:
    """The directory, from the host's side."""

    def __init__(self, place: Path, workload: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.place = place
        shutil.copyfile(workload, place / "dpo_train.py")

    @property
    def golden_seconds(self) -> float | None:
        """How long the golden machine took to load, by its own clock; None while it loads."""
        try:
            return float((self.place / "golden_ready").read_text(encoding="utf-8")) / 1000
        except (OSError, ValueError):
            return None

    def go(self) -> None:
        """Let the clones start."""
        (self.place / "go").touch()

    def claimed(self, number: int) -> bool:
        """Whether a clone has taken that number."""
        return (self.place / f"claim_{number}").exists()

    def events(self, number: int) -> dict[str, dict[str, Any]]:
        """What learner `number` has said, by kind of event."""
        try:
            whole = (self.place / f"learner_{number}.jsonl").read_bytes().split(b"\n")[:-1]
        except OSError:
            return {}
        found: dict[str, dict[str, Any]] = {}
        for line in whole:
            try:
                event = json.loads(line)
                found[str(event["event"])] = event
            except (ValueError, KeyError, TypeError):
                continue
        return found


def done(event: dict[str, Any]) -> Done:
    """A `done` event; what it lacks, or says in no number, is NaN."""

    def number(name: str) -> float:
        value = event.get(name)
        usable = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if usable else math.nan  # type: ignore[arg-type]

    peak, tokens = number("peak_gb"), number("tokens")
    return Done(
        seconds=number("train_s"),
        step_ms=number("step_ms"),
        first_loss=number("loss0"),
        last_loss=number("lossN"),
        peak_gb=peak if math.isfinite(peak) else None,
        tokens=int(tokens) if math.isfinite(tokens) else None,
    )
