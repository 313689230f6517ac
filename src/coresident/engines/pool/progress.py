"""What a training says while it goes: read from the file that its learners append to, so that nothing waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coresident.engines.pool.learning.outputs import METRICS, noted
from coresident.engines.pool.parameters import DPO

PERIOD = 0.5


class Watch:
    """Says, until the block ends, a line for each tenth of a learner's steps and for each evaluation. `now` takes the
    state of all learners in one line, whenever it changed, for a terminal to write over the last one.
    """

    def __init__(
        self, out: Path, parameters: DPO, say: Callable[[str], None], now: Callable[[str], None]
    ) -> None:
        self._file = out / METRICS
        self._steps = parameters.steps
        self._say, self._now = say, now
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._read = self._file.stat().st_size if self._file.is_file() else 0
        self._state: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._over.wait(PERIOD):
            self._look()

    def _look(self) -> None:
        if not self._file.is_file():
            return
        with self._file.open("rb") as stream:
            stream.seek(self._read)
            whole, newline, _ = stream.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        for line in noted(whole):
            self._tell(line)
        if whole and self._state:
            self._now(
                "  ".join(
                    f"{number}: {line['step']}/{self._steps} {line['loss']:.3f}"
                    for number, line in sorted(self._state.items())
                )
            )

    def _tell(self, line: dict[str, Any]) -> None:
        number, step = line["learner"], line["step"]
        if "evaluation" in line:
            held_out = "  ".join(f"{name} {value:.4g}" for name, value in line["evaluation"].items())
            self._say(f"learner {number}  step {step}/{self._steps}  held out: {held_out}")
            return
        self._state[number] = line
        tenth = max(1, self._steps // 10)
        if step == 1 or step % tenth == 0 or step == self._steps:
            margin = f"  margin {line['margin']:+.4f}" if "margin" in line else ""
            speed = line["tokens"] / line["seconds"]
            self._say(
                f"learner {number}  step {step}/{self._steps}  loss {line['loss']:.4f}{margin}  {speed:.0f} tokens/s"
            )
