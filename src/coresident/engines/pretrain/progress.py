"""What a training says while it goes: lines for whoever reads them later, and on a terminal the state of the moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Seconds between two lines of the same virtual epoch.
QUIET = 30.0


@dataclass
class Progress:
    """`say` takes lines, `now` the state of the moment, `report` targets done and in all (for the lab)."""

    say: Callable[[str], None] = lambda _: None
    now: Callable[[str], None] = lambda _: None
    report: Callable[[int, int], None] = lambda *_: None
    clock: Callable[[], float] = time.monotonic
    _total: int = 0
    _first: int = 0
    _said: float | None = None
    _start: float = 0.0
    _steady: tuple[float, int] | None = None

    def started(self, done: int, total: int) -> None:
        """A session begins after `done` of about `total` targets."""
        self._first, self._total, self._start = done, total, self.clock()
        if done:
            self.say(f"going on after {done:,} of {total:,} targets")

    def window(self, told: Mapping[str, Any], epochs: int) -> None:
        """A window was closed; `told` is its row with that of its last update."""
        moment, done = self.clock(), told["targets"]
        line = (
            f"update {told['update']}  epoch {told['epoch'] + 1}/{epochs}  {100 * done / max(self._total, 1):.1f} %"
            f"  loss {told['loss']:.4f}  {told['tokens_per_second']:,.0f} targets/s{self._left(moment, done)}"
        )
        self.report(done, self._total)
        self.now(line)
        if self._said is None or moment - self._said >= QUIET or done >= self._total:
            self._said = moment
            self.say(line)

    def evaluated(self, update: int, told: Mapping[str, Any], final: bool) -> None:
        """The validation split, or the subset of it, was evaluated."""
        families = "".join(
            f"  {name} {loss:.4f}" for name, loss in told["families"].items() if len(told["families"]) > 1
        )
        what = "validation (all)" if final else "validation"
        self.say(f"update {update}  {what} loss {told['loss']:.4f}{families}")

    def _left(self, moment: float, done: int) -> str:
        """What is left, at the rate since the first window, which carries compilation."""
        if self._steady is None:
            self._steady = (moment, done)
            return ""
        since, before = self._steady
        if done <= before or done >= self._total:
            return ""
        return f"  {_clock((moment - since) * (self._total - done) / (done - before))} left"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
