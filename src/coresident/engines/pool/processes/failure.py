"""How an exception in a pool process becomes one sentence and a status that the driver can report."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from coresident.engines.pool.processes.channel import REASON_LIMIT, Channel, Closed
from coresident.errors import CoresidentError

_OUT_OF_DEVICE_MEMORY = (
    "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA out of memory",
)  # fmt: skip
# A library that finds no memory may say anything; it is believed to have found none where less than this was left.
_LIBRARY, _LITTLE = ("CUBLAS_STATUS_", "CUDNN_STATUS_"), 64 << 20


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
        traceback.print_exc()
        sys.stderr.flush()
        remedy = error.remedy if isinstance(error, CoresidentError) else ""
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
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def classify(error: BaseException) -> tuple[str, str]:
    """The cell's status (`oom`, `nonfinite`, `failed`) and the sentence for an exception."""
    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError):
        return "oom", said if str(error) else "out of memory"
    if isinstance(error, FloatingPointError):
        return "nonfinite", said
    if isinstance(error, CoresidentError):
        return "failed", said
    # torch's own exception is not asked for by type: this runs where torch may not be imported.
    if type(error).__name__ == "OutOfMemoryError" or any(sign in said for sign in _OUT_OF_DEVICE_MEMORY):
        return "oom", said
    if any(sign in said for sign in _LIBRARY):
        free = _free_on_the_card()
        if free is not None and free < _LITTLE:
            return "oom", f"{said}, with {free / 2**20:.1f} MiB free on the card"
    # torch has no exception of its own for this on the CPU.
    if isinstance(error, RuntimeError) and ("can't allocate memory" in said or "not enough memory" in said):
        return "oom", said
    return "failed", f"{type(error).__name__}: {said}"


def _free_on_the_card() -> int | None:
    """Bytes; None where this process has no card, or it no longer answers."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    with contextlib.suppress(Exception):
        return int(torch.cuda.mem_get_info()[0])
    return None
