"""How a training is told to stop: the first interrupt or SIGTERM lets it finish its update and keep its state; a second one
ends it at once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Stop:
    """Whether a stop was asked for."""

    asked: bool = False


@contextlib.contextmanager
def stopping(say: Callable[[str], None]) -> Iterator[Stop]:
    """A `Stop` that signals set while it is entered. Outside of the main thread no signal arrives, and none is awaited."""
    stop = Stop()

    def ask(_: int, __: Any) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        say("stopping after the current update (again: stop now)")

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {one: signal.signal(one, ask) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
