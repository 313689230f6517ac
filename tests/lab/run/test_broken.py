"""The last thing that a broken arm said."""

from __future__ import annotations

import pytest

from coresident.lab.run import broken


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ""),
        ({"stdout": "one\ntwo\n\n  \n"}, "two"),
        ({"stdout": "fine\n", "stderr": "Error: no model\n"}, "Error: no model"),
        ({"stdout": "fine\n", "stderr": "\n"}, "fine"),
        ({"log": "a\x1b[31mred"}, "a[31mred"),
        ({"log": "x" * 100_000 + "\nend"}, "end"),
    ],
)
def test_the_last_line_with_anything_on_it(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert broken.last_line(tmp_path) == expected
