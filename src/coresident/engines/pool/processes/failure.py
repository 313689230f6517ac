"""How an exception in a pool process becomes one sentence and a status that the driver can report."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from coresident.engines.pool.processes.channel import REASON_LIMIT, Channel, Closed
from coresident.errors import CoresidentError
from coresident.exhausted import ran_out


@contextlib.contextmanager
def told(channel: Channel) -> Iterator[None]:
    """Tell the driver of any exception in the block, leave the traceback in the log, and end the process with
    status 1.
    """
    try:
        yield
    except (Closed, SystemExit):
        raise
    except BaseException as error:
        status, reason = classify(error)
        # The log may be what cannot be written.
        with contextlib.suppress(OSError):
            traceback.print_exc()
            sys.stderr.flush()
        remedy = error.remedy if isinstance(error, CoresidentError) else ""
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            remedy = "free space on the disk that is written to, and repeat (a training with --resume)"
        channel.tell("failed", status=status, reason=reason[:REASON_LIMIT], remedy=remedy[:REASON_LIMIT])
        raise SystemExit(1) from error


def leave(code: int) -> NoReturn:
    """End this process now: taking an interpreter with torch apart takes seconds of a sibling's time. A compiler's workers are
    processes of their own, and are ended first.
    """
    compiler: Any = sys.modules.get("torch._inductor.async_compile")
    if compiler is not None:
        with contextlib.suppress(Exception):
            compiler.shutdown_compile_workers()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def classify(error: BaseException) -> tuple[str, str]:
    """The cell's status (`oom`, `nonfinite`, `failed`) and the sentence for an exception."""
    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, FloatingPointError):
        return "nonfinite", said
    if isinstance(error, CoresidentError):
        return "failed", said
    if exhausted := ran_out(error):
        return "oom", exhausted
    return "failed", f"{type(error).__name__}: {said}"
