"""JSON without the liberties that parsers take: no duplicate keys, no NaN, no number beyond a float."""

from __future__ import annotations

import json
import math
import re
from typing import Any


def parse(content: bytes) -> Any:
    """The value of a JSON text in UTF-8. Raises `ValueError` saying what is wrong."""
    decoder = _CAREFUL if _LARGE.search(content) else _DECODER
    return decoder.decode(content.decode("utf-8"))


def render(value: Any) -> bytes:
    """A JSON line in UTF-8. Raises `ValueError` for NaN and infinities."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
    return result


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text} is not finite")
    return value


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not a finite number")


# Only a number that is written long or with a large exponent can lie beyond a float. To look at each number of
# thousands of records takes as long as reading them.
_LARGE = re.compile(rb"[0-9][eE]\+?[0-9]{3,}[],}\s]|[0-9]{200}|[0-9][eE]\+?[0-9]+$")
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)
_CAREFUL = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)
