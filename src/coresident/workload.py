"""The one interface between the lab and what it measures.

A workload is a name, a frozen parameter model, the metrics and controls it can report, and a function
`run(parameters, cell)` that executes inside the cell's own process and reports through `cell`. The same function serves
the engine's own command, without a lab. Any program in any language can do without this module: a report is one JSON
object a line, appended to a file of its own in the directory `CORESIDENT_EVENTS`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from coresident.errors import MachineError, UserError, nearest

EVENTS = "CORESIDENT_EVENTS"
CELL = "CORESIDENT_CELL"
WORK = "CORESIDENT_WORK"


class Parameters(BaseModel):
    """Base of every workload's parameters: strict, frozen, unknown keys and non-finite numbers refused.

    Give a new parameter the default that does what was done before there was one: runs begun before go on under it.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class Metric:
    """A number that a workload reports: its unit, and whether more of it is better."""

    name: str
    unit: str
    better: Literal["more", "less"] | None
    about: str


@dataclass(frozen=True)
class Needs:
    """What one cell asks of the machine, known before it starts.

    `workers` run at the same time and are each pinned to `cpus_per_worker` cores of their own (0: unpinned).
    `memory` is a lower bound in bytes of what the cell will occupy; of that, `on_card` lies on the card where the cell
    runs on one, and in the host's memory where it does not. `inputs` are the files whose content matters.
    """

    workers: int = 1
    cpus_per_worker: int = 0
    memory: int = 0
    inputs: tuple[Path, ...] = ()
    on_card: int = 0


@dataclass(frozen=True)
class Launch:
    """A program to run as a cell: its words, what it adds to the environment, where it runs (None: where the lab does)."""

    argv: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None


@dataclass(frozen=True)
class Workload:
    """Something that can be measured.

    `inspect` validates what the parameters point at (raising `UserError` for bad input) and says what the cell needs; it
    is called before anything is written. `controls` are those that the workload itself answers. An `open` workload may
    report metrics and controls beyond the declared ones. `launch`, where given, is the program that runs instead of our own
    Python process; its exit status 0 then says that all is done. `reports` adds metrics that parameters declare.
    """

    name: str
    about: str
    parameters: type[Parameters]
    metrics: tuple[Metric, ...]
    controls: frozenset[str]
    run: Callable[[Any, Reporter], None]
    inspect: Callable[[Any], Needs] = lambda _: Needs()
    resumable: bool = False
    open: bool = False
    launch: Callable[[Any], Launch] | None = None
    reports: Callable[[Any], Mapping[str, Metric]] = lambda _: {}


def workload(name: str) -> Workload:
    """The workload registered under `name` (entry point group `coresident.workloads`)."""
    found = {point.name: point for point in entry_points(group="coresident.workloads")}
    if name not in found:
        raise UserError(f"unknown workload {name!r}", nearest(name, found))
    loaded = found[name].load()
    if not isinstance(loaded, Workload):
        raise UserError(
            f"the entry point of workload {name!r} is not a Workload",
            f"correct the package that declares {name!r}",
        )
    return loaded


@dataclass
class Reporter:
    """How a running cell tells what it does: one event a call, appended to this process's own file.

    Safe across `fork`: a child opens a file of its own at its first event. Times `t` are `time.monotonic()` seconds, which
    all processes of one host share. A value that is not finite is refused here, and by the reader too.
    """

    events: Path
    work: Path
    parameters: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    cpus: Sequence[Sequence[int]] = ()
    show: Callable[[Mapping[str, Any]], None] | None = None
    _file: Any = field(default=None, repr=False)
    _pid: int = field(default=0, repr=False)

    @classmethod
    def from_environment(cls) -> Reporter:
        """The reporter of the cell that this process runs in, as the lab described it in the environment."""
        try:
            described = json.loads(Path(os.environ[CELL]).read_text(encoding="utf-8"))
            return cls(
                events=Path(os.environ[EVENTS]),
                work=Path(os.environ[WORK]),
                parameters=described["cell"]["parameters"],
                device=described["device"],
                cpus=described["cpus"],
            )
        except KeyError as missing:
            raise MachineError(
                f"this process runs in no cell: {missing} is not set", "start it by `coresident run`"
            ) from None

    def _write(self, event: str, **values: Any) -> None:
        line = {"event": event, "t": time.monotonic(), **values}
        if self._file is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self.events.mkdir(parents=True, exist_ok=True)
            self._file = (self.events / f"{self._pid}-{time.monotonic_ns()}.jsonl").open("ab", buffering=0)
        # One write a line: a line is whole or, after a kill, the last one is torn; it never mixes with another.
        self._file.write(json.dumps(line, allow_nan=False, ensure_ascii=False).encode() + b"\n")
        if self.show is not None:
            self.show(line)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what happens now; phases may nest."""
        start = time.monotonic()
        self._write("phase", name=name, start=start)
        try:
            yield
        finally:
            self._write("phase", name=name, start=start, end=time.monotonic())

    def progress(self, done: float, total: float, unit: str = "") -> None:
        """How far the work is."""
        self._write("progress", done=done, total=total, unit=unit)

    def metric(
        self, name: str, value: float, unit: str, scope: Literal["session", "cumulative"] = "session"
    ) -> None:
        """A result. `scope` tells a resumed training's own session from the whole."""
        self._write("metric", name=name, value=_finite(name, value), unit=unit, scope=scope)

    def sample(self, name: str, value: float) -> None:
        """One raw observation behind the metric `name`."""
        self._write("sample", name=name, value=_finite(name, value))

    def series(self, name: str, values: Iterable[float | None]) -> None:
        """A whole sequence, such as a learner's losses; compared bit for bit by `same`. None stands for not finite."""
        clean = [None if value is None or not math.isfinite(value) else float(value) for value in values]
        self._write("series", name=name, values=clean)

    def digest(self, name: str, value: str) -> None:
        """A hash of bytes that should be equal wherever the same work was done."""
        self._write("digest", name=name, value=value)

    def control(self, name: str, asked: Any, ran: Any, passed: bool | None, reason: str = "") -> None:
        """What was asked, what took effect, and whether that is what was asked (None: it could not be read, `reason` why)."""
        self._write("control", name=name, asked=asked, ran=ran, passed=passed, reason=reason)

    def worker(self, identity: str, start: float, end: float, work: float, unit: str) -> None:
        """A worker's window (monotonic seconds) and the work it did in it."""
        self._write("worker", id=identity, start=start, end=end, work=work, unit=unit)

    def environment(self, values: Mapping[str, Any]) -> None:
        """Facts about the interpreter that did the work."""
        self._write("environment", values=dict(values))

    def failed(self, status: Literal["failed", "oom", "nonfinite"], reason: str) -> None:
        """The cell ends with a status that is not `ok`, and why."""
        self._write("failed", status=status, reason=reason)

    def done(self) -> None:
        """All work is done and reported. Without this the cell has failed, whatever its exit code."""
        self._write("done")


def _finite(name: str, value: float) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise UserError(
            f"metric {name!r} is {number}, not a finite number", "report the cell as nonfinite instead"
        )
    return number
