"""What to do when a shim itself is killed: its processes are adopted by the lab, which finds, kills and reaps
them.

The kernel gives an orphan to its nearest living subreaper. While cells run the lab is one too, so that what
was below a dead shim becomes the lab's own children, beside those that the lab started itself and must not
touch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from coresident.lab.run.process import shim

# All shims of this process (cells may run in several threads), and how many of them need us as a subreaper.
LOCK = threading.Lock()
SHIMS: set[int] = set()
_adopters = 0
_before = 0


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Be a subreaper meanwhile; what was before is restored when the last of several has left."""
    global _adopters, _before
    with LOCK:
        if _adopters == 0:
            value = ctypes.c_int()
            ctypes.CDLL(None).prctl(shim.PR_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0)
            _before = value.value
            shim.prctl(shim.PR_SET_CHILD_SUBREAPER, 1)
        _adopters += 1
    try:
        yield
    finally:
        with LOCK:
            _adopters -= 1
            if _adopters == 0:
                shim.prctl(shim.PR_SET_CHILD_SUBREAPER, _before)


@dataclass
class Below:
    """Tells the processes that were below one shim from the lab's own children, should it be killed.

    `born` is the shim's start in clock ticks; `own` are children (pid, start) of this process while it lived.
    """

    shim: int
    born: int
    own: set[tuple[int, int]] = field(default_factory=set)

    def look(self) -> None:
        """Remember which children are our own. To be called every now and then while the shim lives."""
        processes = shim.snapshot()
        stat = shim.stat_of(self.shim)
        # Only while it lives after the look, too: else the children in it may be those just adopted.
        if stat is not None and stat[1] not in "ZX":
            self.own |= {(pid, its[3]) for pid, its in processes.items() if its[0] == os.getpid()}

    def strays(self) -> dict[int, str]:
        """Pid and state of all that was below the shim, now that it is dead.

        These are the children that have come to us since the last look, and all below them. A child that the
        lab has started itself meanwhile is in the lab's session, or is another cell's shim; a cell never is.
        """
        processes = shim.snapshot()
        me, session = os.getpid(), os.getsid(0)
        with LOCK:
            shims = set(SHIMS)
        tops = {
            pid
            for pid, (parent, _, its_session, start) in processes.items()
            if parent == me and its_session != session and start >= self.born and (pid, start) not in self.own
        } - shims
        return {pid: processes[pid][1] for pid in tops | shim.below(tops, processes)}

    def kill(self) -> int:
        """Kill and reap them all; how many could not be killed."""
        deadline = time.monotonic() + shim.UNKILLABLE
        while strays := self.strays():
            if self._running():
                shim.freeze_and_kill(self._running)
            for pid in strays:
                # Only these: waiting for any child would steal the exit status of one that the lab itself
                # waits for.
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if time.monotonic() > deadline:
                break
            time.sleep(shim.PAUSE)
        return len(self._running())

    def _running(self) -> set[int]:
        return {pid for pid, state in self.strays().items() if state not in "ZX"}
