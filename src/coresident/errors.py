"""What can go wrong, in three families: the user's input, the machine's state, our own bug.

Every message is one sentence that says what is wrong and where; every error carries a remedy that says what to do.
The command line prints both and exits with the family's status. Status 1 is never an error: it means "refuted".
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class CoresidentError(Exception):
    """Base of all errors that we raise on purpose.

    `problem` says what is wrong and where (file, key, line); `remedy` says what to do about it.
    """

    status = 70

    def __init__(self, problem: str, remedy: str) -> None:
        # Both, because an exception that comes out of a worker is made anew from its `args`.
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy}"


class UserError(CoresidentError):
    """The input is wrong: a study, a parameter, a path, a file's content."""

    status = 2


class MachineError(CoresidentError):
    """The machine cannot do what is asked now: memory, cores, disk, device, permissions, a lock."""

    status = 2


class InternalError(CoresidentError):
    """Our own bug: a state that the code promises never to reach."""

    status = 70

    def __init__(
        self,
        problem: str,
        remedy: str = "this is a bug in coresident: please report it with the traceback (--debug)",
    ) -> None:
        super().__init__(problem, remedy)


@contextmanager
def located(where: str) -> Iterator[None]:
    """Say where it was asked for (a file and key, a cell) before the problem of an error that does not know."""
    try:
        yield
    except CoresidentError as error:
        error.problem = f"{where}: {error.problem}"
        raise


@contextmanager
def interruptible(remedy: Callable[[], str]) -> Iterator[None]:
    """What an interrupt in here is told with: how to go on, which holds for a part of the commands only."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(*(error.args or (remedy(),))) from None


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The remedy for an unknown name: the nearest known one, or, where none is as near as `cutoff`, all of them.

    >>> nearest("learnrs", ["learners", "steps"])
    "did you mean 'learners'?"
    """
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(known)}" if known else "none is known here"
