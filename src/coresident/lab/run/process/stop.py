"""How a run is asked to stop: after the running cell (Ctrl-C once), or now (Ctrl-C twice, or SIGTERM)."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class StopFlag:
    """What was asked so far: `finish` (stop after the running cell) and `now` (end the running cell too).

    `fileno()` becomes readable, and stays so, once `now` is set: whoever waits for a cell can wait for this
    as well.
    """

    def __init__(self) -> None:
        self.finish = False
        self._now = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._wake)

    def fileno(self) -> int:
        return self._wake

    @property
    def now(self) -> bool:
        return self._now

    @now.setter
    def now(self, asked: bool) -> None:
        self._now = asked
        if asked:
            self.finish = True
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._wake, 1)


class Stop(StopFlag):
    """A `StopFlag` that signals set while it is entered: SIGINT once `finish`, twice `now`; SIGTERM and
    SIGHUP `now`.

    `say` gets one line for each change. A signal that was ignored on entry (`nohup`, a background job of a
    shell) stays ignored; what handled the others is restored on exit. To be entered in the main thread.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            # None: the handler was not installed from Python, so that Python cannot put it back either.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _asked(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT and not self.finish:
            self.finish = True
            self._tell("stopping after the cell that is running (Ctrl-C again: stop it now)")
        elif not self.now:
            self.now = True
            self._tell(f"stopping now: the running cell is ended and recorded as interrupted ({name})")

    def _tell(self, line: str) -> None:
        try:
            self._say(line)
        except RuntimeError:
            # The signal came in the middle of a print: a buffered stream refuses to be entered twice.
            with contextlib.suppress(OSError):
                os.write(2, line.encode() + b"\n")
        except OSError:
            # The terminal is gone (SIGHUP says so): the cell is ended and recorded all the same.
            return
