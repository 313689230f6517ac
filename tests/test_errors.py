"""Errors are the same wherever they are raised, and come out of a worker whole."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from coresident.errors import CoresidentError, InternalError, MachineError, UserError, located


def _fail(error: CoresidentError) -> None:
    with located("there"):
        raise error


@pytest.mark.parametrize(
    "error", [UserError("bad text", "mend it"), MachineError("full", "free it"), InternalError("a bug")]
)
def test_an_error_of_a_worker_is_told_as_it_was_raised(error: CoresidentError) -> None:
    with (
        ProcessPoolExecutor(1, get_context("fork")) as pool,
        pytest.raises(type(error)) as raised,
    ):
        pool.submit(_fail, error).result()
    assert raised.value.problem == f"there: {error.problem}"
    assert raised.value.remedy == error.remedy
