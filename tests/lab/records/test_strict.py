"""Strict JSON: every number is finite, however it is written, and ordinary ones cost nothing."""

from __future__ import annotations

import pytest

from coresident.lab.records import strict


@pytest.mark.parametrize(
    "text",
    [
        "1e400",
        '{"a":1E+999}',
        "[-1e309 ]",
        "[12345678901e299]",
        "[1e+0400]",
        f"[{'9' * 310}.5]",
        f"[{'9' * 250}e60]",
        '{"a": 1e309\n}',
        "[NaN]",
        "[Infinity]",
    ],
)
def test_what_is_beyond_a_float_is_refused_however_it_is_written(text: str) -> None:
    with pytest.raises(ValueError, match="finite"):
        strict.parse(text.encode())


@pytest.mark.parametrize("value", [1e308, -1e-320, 0.1, 1.5e99, 2.2250738585072014e-308, 1e16])
def test_a_finite_number_is_read_as_it_was_written(value: float) -> None:
    assert strict.parse(strict.render({"a": [value]})) == {"a": [value]}


def test_a_digest_that_looks_like_an_exponent_is_a_text() -> None:
    assert strict.parse(b'{"a":"1e999"}') == {"a": "1e999"}
