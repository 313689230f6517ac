"""Sets of experts as rows of true and false: the form in which whole traces are counted at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]


def masks(experts: NDArray[Any], count: int) -> Bools:
    """[..., k] numbers as bool [..., count]."""
    found = np.zeros((*experts.shape[:-1], count), dtype=np.bool_)
    np.put_along_axis(found, experts.astype(np.int64), True, axis=-1)
    return found
