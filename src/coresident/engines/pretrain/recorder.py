"""What updates gave, fetched from the device a window at a time, and how fast they were.

Within a window nothing waits for the device. At its end one transfer brings every figure over, and the clock is read after it: a
time is never taken of work that is only ordered. Validation and checkpoints lie between windows. A session's first window
is its first update alone, which carries compilation and whatever else happens once.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from coresident.engines.pretrain.directory import Rows
from coresident.engines.pretrain.update import Figures

if TYPE_CHECKING:
    from torch import Tensor


class NonFinite(FloatingPointError):  # noqa: N818 - it is an outcome
    """A loss, a gradient or a weight is NaN or infinite: an outcome of the training. By a gradient that is not finite nothing
    moves.
    """


@dataclass(frozen=True)
class Told:
    """What the host knows of an update when it orders it: `valid` targets in it, `targets` in all until then."""

    update: int
    epoch: int
    valid: int
    targets: int
    rate: float
    samples: str


@dataclass
class Recorder:
    """Collects a session's updates. `training` and `elapsed` are the seconds of earlier sessions; `mixture` says whether the
    auxiliary loss means anything; `rejected` is the device's word on what was not finite.
    """

    rows: Rows
    mixture: bool
    rejected: Tensor
    training: float = 0.0
    elapsed: float = 0.0
    clock: Callable[[], float] = time.monotonic
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    session_targets: int = 0
    session_seconds: float = 0.0
    first_seconds: float | None = None
    last: dict[str, Any] = field(default_factory=dict)
    _pending: list[tuple[Told, Tensor]] = field(default_factory=list)
    _start: float | None = None
    _first_start: float | None = None

    def begin(self, began: float | None = None) -> None:
        """An update is about to be ordered, whose data were asked for at `began` (None: now): a window starts there if none is
        open.
        """
        if self._start is None:
            self._start = self.clock() if began is None else began
            self._first_start = self._start if self._first_start is None else self._first_start

    def add(self, told: Told, figures: Figures) -> None:
        """An update was ordered."""
        self._pending.append((told, figures.stacked()))

    @property
    def pending(self) -> int:
        """How many updates are in the open window."""
        return len(self._pending)

    def seconds(self) -> tuple[float, float]:
        """Training and elapsed seconds until now, over all sessions."""
        return self.training + self.session_seconds, self.elapsed + self.session_elapsed()

    def session_elapsed(self) -> float:
        """Seconds since this session's first update, validation and checkpoints included; 0 before it."""
        return 0.0 if self._first_start is None else self.clock() - self._first_start

    def flush(self) -> dict[str, Any] | None:
        """Close the window: wait for the device, write its rows, and return the window's; None if it is empty.

        Raises NonFinite naming the update, after writing the rows of those before it.
        """
        if not self._pending or self._start is None:
            return None
        values = torch.stack([tensor for _, tensor in self._pending]).tolist()
        rejected = int(self.rejected.item())
        spent = self.clock() - self._start
        told = [one for one, _ in self._pending]
        self._pending, self._start = [], None
        rows: list[dict[str, Any]] = []
        for one, figures in zip(told, values, strict=True):
            if rejected and one.update >= rejected:
                self.rows.add(rows)
                raise NonFinite(_sentence(one.update, *figures))
            loss, auxiliary, norm = figures
            rows.append(_row(one, loss, auxiliary if self.mixture else None, norm))
            self.losses.append(loss)
        window = self._window(told, spent)
        self.rows.add([*rows, window])
        self.last = {**rows[-1], **window}
        return window

    def steady_rate(self) -> float | None:
        """Targets a second: the median of the session's windows after its first; None where there is none."""
        return statistics.median(self.rates) if self.rates else None

    def _window(self, told: list[Told], spent: float) -> dict[str, Any]:
        targets = sum(one.valid for one in told)
        self.session_targets += targets
        self.session_seconds += spent
        if self.first_seconds is None:
            self.first_seconds = spent
        else:
            self.rates.append(targets / spent)
        training, elapsed = self.seconds()
        return {
            "update": told[-1].update,
            "window": len(told),
            "seconds": spent,
            "tokens_per_second": targets / spent,
            "elapsed_tokens_per_second": told[-1].targets / elapsed,
            "training_seconds": training,
            "elapsed_seconds": elapsed,
            **({"first": True} if not self.rates else {}),
        }


def _row(one: Told, loss: float, auxiliary: float | None, norm: float) -> dict[str, Any]:
    return {
        "update": one.update,
        "epoch": one.epoch,
        "targets": one.targets,
        "valid": one.valid,
        "loss": loss,
        **({} if auxiliary is None else {"auxiliary": auxiliary}),
        "gradient_norm": norm,
        "learning_rate": one.rate,
        "samples": one.samples,
    }


def _sentence(update: int, loss: float, auxiliary: float, norm: float) -> str:
    named = {"loss": loss, "auxiliary loss": auxiliary, "gradient's norm": norm}
    name, value = next(
        ((name, one) for name, one in named.items() if not math.isfinite(one)), ("gradient's norm", norm)
    )
    return f"the {name} is {value} at update {update}; nothing moved since update {update - 1}"
