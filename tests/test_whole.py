"""A file is there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from coresident import mincore, whole
from coresident.errors import MachineError


def test_it_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    whole.write_json(tmp_path / "a.json", {"one": 1})
    whole.write(tmp_path / "a.json", "two")
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "two"


def test_what_is_no_json_leaves_the_one_that_is_there(tmp_path: Path) -> None:
    whole.write(tmp_path / "a.json", "{}")
    with pytest.raises(ValueError, match="not JSON compliant"):
        whole.write_json(tmp_path / "a.json", {"one": float("nan")})
    assert (tmp_path / "a.json").read_text() == "{}"


def test_a_disk_that_does_not_take_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"a\.json cannot be written: No such file"):
        whole.write(tmp_path / "none" / "a.json", "x")


def test_pages_that_were_just_written_are_in_memory(tmp_path: Path) -> None:
    (tmp_path / "pages").write_bytes(bytes(3 * 4096 + 1))
    (tmp_path / "empty").touch()
    with (tmp_path / "pages").open("rb") as pages, (tmp_path / "empty").open("rb") as empty:
        found = mincore.resident(pages.fileno())
        assert [value & 1 for value in found] == [1, 1, 1, 1]
        assert mincore.resident(empty.fileno()) == b""
