"""Memory that ran out: whoever says so, in whatever words, and however it is wrapped."""

from __future__ import annotations

import contextlib
import errno
import sys
from typing import Any

# What PyTorch, cuBLAS, cuDNN, the CUDA runtime, JAX and PyTorch's allocator on a CPU say, in lower case; few have a type of their
# own for it.
_WORDS = (
    "out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "can't allocate memory",
    "not enough memory",
)
# A library that finds no memory may say anything; it is believed to have found none where less than this was left.
_LIBRARY, _LITTLE = ("CUBLAS_STATUS_", "CUDNN_STATUS_"), 64 << 20


def ran_out(error: BaseException | None) -> str | None:
    """The sentence of an error that says that memory ran out, or of what it was raised from or after; None of any other.

    Only a RuntimeError is looked behind: what compiles or captures a step wraps what went wrong in one, and any other error
    that follows is its own.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        said = " ".join(str(error).split())
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return said or _WORDS[0]
        if not isinstance(error, RuntimeError):
            return None
        if any(words in said.lower() for words in _WORDS) or type(error).__name__ == "OutOfMemoryError":
            return said or _WORDS[0]
        if any(sign in said for sign in _LIBRARY):
            free = _free_on_the_card()
            if free is not None and free < _LITTLE:
                return f"{said}, with {free / 2**20:.1f} MiB free on the card"
        error = error.__cause__ or error.__context__
    return None


def _free_on_the_card() -> int | None:
    """Bytes; None where this process has no card, or it no longer answers."""
    torch: Any = sys.modules.get("torch")
    with contextlib.suppress(Exception):
        if torch.cuda.is_initialized():
            return int(torch.cuda.mem_get_info()[0])
    return None
