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
    """The device or the host has too little memory for the training as it was asked for; `remedy` says what takes less."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem, self.remedy = problem, remedy

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy}"


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
def memory_outcome(remedy: str) -> Iterator[None]:
    """Whatever says that memory ran out becomes OutOfMemory, with what to do about it where nothing inside knew better."""
    try:
        yield
    except OutOfMemory:
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        said = " ".join(str(error).split()).split(". ")[0][:200]
        raise OutOfMemory(f"memory ran out ({said})", remedy) from error


def smaller(name: str, size: int, whole: int | None = None) -> str:
    """What to set `name` to, which is `size` and divides `whole`, where memory ran out."""
    fits = next((one for one in range(size // 2, 0, -1) if whole is None or whole % one == 0), None)
    if fits is None:
        return f"{name} is {size} already: take a smaller model or context, or runtime.loss_chunk"
    return f"set {name} to {fits} (it is {size})"
