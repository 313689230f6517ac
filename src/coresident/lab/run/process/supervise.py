"""Runs one command as a cell: isolated under a shim, watched by a monotonic clock, gone when it returns."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from coresident.errors import MachineError, UserError
from coresident.lab.run.process import shim, strays
from coresident.lab.run.process.oom import kills
from coresident.lab.run.process.stop import StopFlag

LOG_LIMIT = 2**30
SLACK = (
    15.0  # seconds that a shim may need beyond the grace (stuck processes) before it counts as stuck itself
)
LOOK = 0.5  # seconds between looks at log sizes and descendants: ticks may be much closer

Reason = Literal["", "timeout", "interrupt", "flood"]


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Either `exit_code` or `signal` is set, or neither: when it could not be started, or when the shim was
    killed (`lost`). `timed_out`, `interrupted`: it was ended for that reason (an end by itself meanwhile does
    not count). `problem` is one sentence when it could not start or was ended for any other reason.
    `started`, `ended` (of the direct child) and `asked_to_end` are `time.monotonic()` seconds; `wall` is
    between the first two; `cpu` seconds cover all descendants that were waited for; `maxrss` is the largest
    single process's, in bytes. `leftovers` still ran when the direct child had ended; `survivors` could not
    even be killed. `oom_kills`: the kernel's kills for want of memory meanwhile (None: no counter).
    """

    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    interrupted: bool = False
    lost: bool = False
    problem: str = ""
    wall: float = 0.0
    cpu: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    asked_to_end: float | None = None
    leftovers: int = 0
    survivors: int = 0
    maxrss: int = 0
    oom_kills: int | None = None


def supervise(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | str,
    stdout: Path,
    stderr: Path,
    timeout: float,
    grace: float,
    cpus: set[int] | None = None,
    on_tick: Callable[[int], None] | None = None,
    tick: float = 0.1,
    stop: StopFlag | None = None,
    log_limit: int = LOG_LIMIT,
    hold: int | None = None,
) -> Outcome:
    """Run `argv` to its end, with all that it starts, and say how it went. Standard input is empty.

    Ended early by `timeout` (seconds), by `stop.now`, or when its output files together exceed `log_limit`
    bytes (they are cut to it): TERM to everything below the shim, `grace` seconds, KILL. `on_tick(pid of the
    shim)` is called at once and every `tick` seconds; what it raises ends the cell and is passed on. `stdout`
    and `stderr` are appended to, and may be one file. `hold` is a descriptor (a lock's) that the shim keeps
    open until nothing of the cell is left, even if this process is killed. A command that cannot be executed is an `Outcome` with
    a `problem`; a missing `cwd` is a `UserError`, unwritable output a `MachineError`.
    """
    stop = stop or StopFlag()
    if stop.now:
        now = time.monotonic()
        return Outcome(interrupted=True, started=now, ended=now)
    if not Path(cwd).is_dir():
        raise UserError(f"the working directory {str(cwd)!r} does not exist", "create it, or correct `cwd`")
    before = kills()
    with strays.adopting(), _outputs(stdout, stderr) as outputs:
        try:
            run = _Run(argv, env, cwd, outputs, grace, cpus, hold)
        except (OSError, ValueError) as error:
            now = time.monotonic()
            return Outcome(problem=f"the command cannot be started: {error}", started=now, ended=now)
        try:
            _watch(run, timeout, grace, on_tick, tick, stop, {stdout, stderr}, log_limit)
        finally:
            run.close()
    after = kills()
    return run.outcome(None if before is None or after is None else after - before, log_limit)


class _Run:
    """A started shim and what is known of it."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: Path | str,
        outputs: tuple[BinaryIO, BinaryIO],
        grace: float,
        cpus: set[int] | None,
        hold: int | None,
    ) -> None:
        self.report: dict[str, Any] | None = None
        self.lost = False
        self.survivors = 0
        self.why: Reason = ""
        self.asked_to_end: float | None = None
        self._text = b""
        heard, self.control = os.pipe()
        self.status, told = os.pipe()
        os.set_blocking(self.status, False)
        cores = ",".join(str(core) for core in sorted(cpus or ()))
        command = [
            sys.executable,
            "-I",
            "-S",
            shim.__file__,
            str(heard),
            str(told),
            repr(float(grace)),
            cores,
            *argv,
        ]
        self.started = time.monotonic()
        try:
            # Under the lock: another thread that looks for strays must never see a shim that it cannot know
            # of.
            with strays.LOCK:
                self.process = subprocess.Popen(
                    command,
                    env=dict(env),
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=outputs[0],
                    stderr=outputs[1],
                    pass_fds=(heard, told) if hold is None else (heard, told, hold),
                    start_new_session=True,
                )
                strays.SHIMS.add(self.process.pid)
        except BaseException:
            os.close(self.control)
            os.close(self.status)
            raise
        finally:
            os.close(heard)
            os.close(told)
        stat = shim.stat_of(self.process.pid)
        self.below = strays.Below(self.process.pid, 0 if stat is None else stat[3])

    def hear(self) -> bool:
        """Take what the shim wrote; whether it has spoken to the end."""
        while True:
            try:
                piece = os.read(self.status, 65536)
            except BlockingIOError:
                return False
            if not piece:
                break
            self._text += piece
        # One write of less than a pipe's buffer: the line is whole, or the shim died before it.
        if self._text.endswith(b"\n"):
            self.report = json.loads(self._text)
        else:
            self.lost = True
        return True

    def end(self, why: Reason) -> None:
        """Ask the shim to end the cell; the first reason stays."""
        if not self.why:
            self.why = why
            self._tell(b"t")

    def _tell(self, word: bytes) -> None:
        if self.asked_to_end is None:
            self.asked_to_end = time.monotonic()
        with contextlib.suppress(OSError):
            os.write(self.control, word)

    def close(self) -> None:
        """Leave nothing: not the shim, not what was below it, not a pipe."""
        try:
            if self.report is None and not self.lost:
                # Only an exception leads here: nobody will ask for an outcome.
                self._tell(b"k")
                self.lost = not _readable(self.status, SLACK) or not self.hear() or self.report is None
            if self.lost:
                self.process.kill()
            self.process.wait()
            if self.lost:
                self.survivors = self.below.kill()
        finally:
            with strays.LOCK:
                strays.SHIMS.discard(self.process.pid)
            os.close(self.control)
            os.close(self.status)

    def outcome(self, oom_kills: int | None, log_limit: int) -> Outcome:
        report = self.report
        if report is None:
            ended = time.monotonic()
            return Outcome(
                lost=True,
                timed_out=self.why == "timeout",
                interrupted=self.why == "interrupt",
                started=self.started,
                ended=ended,
                wall=ended - self.started,
                asked_to_end=self.asked_to_end,
                survivors=self.survivors,
                oom_kills=oom_kills,
            )
        by_us = report["ended_by"] in ("terminate", "kill")
        problem = report["problem"]
        if by_us and self.why == "flood":
            problem = f"its output exceeded {_size(log_limit)} and it was ended"
        elif report["ended_by"] == "signal":
            problem = "it was ended because something outside the lab sent SIGTERM to its shim"
        return Outcome(
            exit_code=report["exit"],
            signal=report["signal"],
            timed_out=by_us and self.why == "timeout",
            interrupted=by_us and self.why == "interrupt",
            problem=problem,
            wall=report["ended"] - report["started"],
            cpu=report["cpu"],
            started=report["started"],
            ended=report["ended"],
            asked_to_end=self.asked_to_end if by_us else None,
            leftovers=report["leftovers"],
            survivors=report["survivors"],
            maxrss=report["maxrss"],
            oom_kills=oom_kills,
        )


def _watch(
    run: _Run,
    timeout: float,
    grace: float,
    on_tick: Callable[[int], None] | None,
    tick: float,
    stop: StopFlag,
    logs: set[Path],
    log_limit: int,
) -> None:
    """Wait for the shim's report, tick, and end the cell when there is a reason: a report, or `lost`."""
    poll = select.poll()
    poll.register(run.status, select.POLLIN)
    poll.register(stop.fileno(), select.POLLIN)
    listening = True
    next_tick = next_look = run.started
    while True:
        now = time.monotonic()
        if on_tick is not None and now >= next_tick:
            on_tick(run.process.pid)
            next_tick = max(next_tick + tick, now)
        if now >= next_look:
            run.below.look()
            next_look = now + LOOK
            if sum(_length(log) for log in logs) > log_limit:
                run.end("flood")
        if stop.now and listening:
            # Its descriptor stays readable: listening on would be a busy loop.
            listening = False
            poll.unregister(stop.fileno())
            run.end("interrupt")
        if now >= run.started + timeout:
            run.end("timeout")
        if run.asked_to_end is None:
            until = run.started + timeout
        else:
            until = run.asked_to_end + grace + SLACK
            if now >= until:
                # The shim does not answer (stopped, or stuck): its processes are killed from here.
                run.lost = True
                return
        until = min(until, next_look, next_tick if on_tick is not None else until)
        for descriptor, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000 + 1):
            if descriptor == run.status and run.hear():
                _cut(logs, log_limit)
                return


@contextlib.contextmanager
def _outputs(stdout: Path, stderr: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    with contextlib.ExitStack() as opened:
        try:
            out = opened.enter_context(stdout.open("ab"))
            err = out if stderr == stdout else opened.enter_context(stderr.open("ab"))
        except OSError as error:
            raise MachineError(
                f"the cell's output cannot be written to {error.filename}: {error.strerror}",
                "choose a writable directory by --out",
            ) from None
        yield out, err


def _cut(logs: set[Path], limit: int) -> None:
    for log in logs:
        if _length(log) > limit:
            os.truncate(log, limit)


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _size(count: int) -> str:
    return f"{count / 2**30:g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"


def _readable(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
