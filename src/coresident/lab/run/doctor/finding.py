"""What the doctor says: one fact about the machine, whether it matters, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Finding:
    """`level` is ok; warn (numbers may be noisy or lack something); or bad (the lab cannot measure so).
    `remedy` is empty where there is nothing to do."""

    level: Level
    what: str
    remedy: str = ""


def ok(what: str) -> Finding:
    return Finding("ok", what)


def warn(what: str, remedy: str) -> Finding:
    return Finding("warn", what, remedy)


def bad(what: str, remedy: str) -> Finding:
    return Finding("bad", what, remedy)
