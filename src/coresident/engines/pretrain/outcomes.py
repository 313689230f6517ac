"""How a training can end that is neither done nor a bug: out of memory, whoever says so and however it is wrapped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

# What PyTorch, cuBLAS, cuDNN, the CUDA runtime and PyTorch's allocator on a CPU say; only the first has a type of its own.
_SAID = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "can't allocate memory",
)


class OutOfMemory(MemoryError):  # noqa: N818 - it is an outcome
    """The device or the host has too little memory for the training as it was asked for."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, says that memory ran out."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError) or any(words in str(error) for words in _SAID):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def memory_outcome() -> Iterator[None]:
    """Whatever says that memory ran out becomes OutOfMemory, with what to do about it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        said = " ".join(str(error).split()).split(". ")[0][:200]
        raise OutOfMemory(
            f"memory ran out ({said}): set a smaller microbatch (or validation.batch, if it was validating)"
        ) from error
