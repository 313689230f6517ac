"""One hash for one sequence, whoever writes the record: what the expectation `same` compares."""

from __future__ import annotations

import hashlib
import math
import sys
from array import array
from collections.abc import Sequence


def series_digest(values: Sequence[float | None]) -> str:
    """SHA-256 (hex) over the values as little-endian float64, None as the quiet NaN: equal bit for bit."""
    numbers = array("d", (math.nan if value is None else value for value in values))
    if sys.byteorder == "big":
        numbers.byteswap()
    return hashlib.sha256(numbers.tobytes()).hexdigest()
