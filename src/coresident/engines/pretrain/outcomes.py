"""How a training can end that is neither done nor a bug: out of memory, with what to do about it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from coresident.exhausted import ran_out


class OutOfMemory(MemoryError):  # noqa: N818 - it is an outcome
    """The device or the host has too little memory for the training as it was asked for; `remedy` says what takes less."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem, self.remedy = problem, remedy

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy}"


@contextlib.contextmanager
def memory_outcome(remedy: str) -> Iterator[None]:
    """Whatever says that memory ran out becomes OutOfMemory, with what to do about it where nothing inside knew better."""
    try:
        yield
    except OutOfMemory:
        raise
    except (RuntimeError, MemoryError) as error:
        said = ran_out(error)
        if said is None:
            raise
        raise OutOfMemory(f"memory ran out ({said.split('. ')[0][:200]})", remedy) from error


def smaller(name: str, size: int, whole: int | None = None) -> str:
    """What to set `name` to, which is `size` and divides `whole`, where memory ran out."""
    fits = next((one for one in range(size // 2, 0, -1) if whole is None or whole % one == 0), None)
    if fits is None:
        return f"{name} is {size} already: take a smaller model or context, or runtime.loss_chunk"
    return f"set {name} to {fits} (it is {size})"
