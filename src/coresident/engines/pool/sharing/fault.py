"""A learner that writes into the shared base is stopped by its own fault, and says which tensor it was.

The base is mapped read-only, so a write raises SIGSEGV in the thread that tried it. The handler looks up the
address: inside the base it sends one prepared line to the driver and ends the process with status 77;
elsewhere it hands the signal back to whoever had it before, and the fault goes its ordinary way. SIGBUS means
that a mapped file was cut short under us.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import signal
from collections.abc import Mapping
from typing import Any

EXIT = 77

_SA_SIGINFO = 0x4
_SA_NODEFER = 0x40000000
# siginfo_t on 64-bit Linux: si_signo, si_errno, si_code, padding, then the union whose first member is
# si_addr.
_ADDRESS_AT = 16

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """glibc's and musl's `struct sigaction` on 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


# What the C side holds pointers to must outlive the installation.
_kept: list[Any] = []


def guard(ranges: Mapping[str, tuple[int, int]], descriptor: int, wrote: bytes, cut: bytes) -> str | None:
    """From now on, a fault inside one of `ranges` (addresses `[start, end)` by tensor name) is told and ends
    the process.

    `wrote` and `cut` are whole lines for SIGSEGV and SIGBUS, with `@` where the tensor's name goes; they are
    written to `descriptor`. Returns None when the guard stands, else why it could not be set up: such a fault
    then kills the process with SIGSEGV, unnamed.
    """
    ordered = sorted((start, end, name) for name, (start, end) in ranges.items())
    starts = [start for start, _, _ in ordered]
    lines = {
        signal.SIGSEGV: [wrote.replace(b"@", name.encode()) for _, _, name in ordered],
        signal.SIGBUS: [cut.replace(b"@", name.encode()) for _, _, name in ordered],
    }
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        previous = {number: _Action() for number in lines}

        def handle(number: int, info: int, _context: int) -> None:
            address = ctypes.c_uint64.from_address(info + _ADDRESS_AT).value
            place = bisect.bisect_right(starts, address) - 1
            if place >= 0 and address < ordered[place][1]:
                os.write(descriptor, lines[signal.Signals(number)][place])
                os._exit(EXIT)
            # Not ours: with the earlier action back, the instruction runs again and faults as it would have.
            libc.sigaction(number, ctypes.byref(previous[signal.Signals(number)]), None)

        entry = _HANDLER(handle)
        action = _Action(ctypes.cast(entry, ctypes.c_void_p).value, flags=_SA_SIGINFO | _SA_NODEFER)
        _kept.extend((entry, action, previous))
        for number, earlier in previous.items():
            if libc.sigaction(int(number), ctypes.byref(action), ctypes.byref(earlier)):
                return f"sigaction failed: {os.strerror(ctypes.get_errno())}"
    except (OSError, AttributeError) as error:
        return f"no signal handler can be set here: {error}"
    return None
