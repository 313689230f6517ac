"""Sizes in bytes as people write them, such as 80GiB."""

from __future__ import annotations

import re

_UNITS: dict[str, int] = {
    "B": 1,
    **{f"{letter}iB": 1 << 10 * power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}B": int(10 ** (3 * power)) for power, letter in enumerate("KMGT", start=1)},
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")


def parse(text: str) -> int:
    """The bytes of `80GiB`, `512 MiB` or `1.5GB` (powers of 1024 and of 1000). Raises ValueError otherwise.

    >>> parse("80GiB")
    85899345920
    """
    told = _SIZE.fullmatch(text)
    if told is None or told[2] not in _UNITS:
        raise ValueError(f"{text!r} is no size: write a number and one of {', '.join(sorted(_UNITS))}")
    size = round(float(told[1]) * _UNITS[told[2]])
    if size < 1:
        raise ValueError(f"{text!r} is no size: it must be at least a byte")
    return size


def show(size: float) -> str:
    """A size for a message: GiB from one GiB on, else MiB.

    >>> show(5 * 2**29)
    '2.50 GiB'
    """
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
