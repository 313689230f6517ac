"""A pool process never outlives who started it, not even when that one is killed without warning."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent (a pid) ends; end now if it already has."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    except (OSError, AttributeError):
        # Without it the end of the channel is still noticed, at the next message.
        return
    if os.getppid() != parent:
        os._exit(1)
