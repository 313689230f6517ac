"""States that are to be kept together are: however far it came when it was killed, all become checkpoints, or none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coresident.engines.pool import commands
from coresident.engines.pool.learning import outputs
from coresident.errors import MachineError


class Killed(BaseException):
    """Nothing runs after it."""


def written(work: Path, number: int) -> None:
    outputs.next_checkpoint(work, number).write_text("new")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Three learners with a checkpoint each."""
    (tmp_path / outputs.CHECKPOINTS).mkdir()
    for number in range(3):
        outputs.checkpoint(tmp_path, number).write_text("old")
    return tmp_path


def found(work: Path) -> list[str]:
    return [outputs.checkpoint(work, number).read_text() for number in range(3)]


@pytest.mark.parametrize("there", range(4))
def test_a_kill_before_all_are_written_leaves_the_old_ones(work: Path, there: int) -> None:
    for number in range(there):
        written(work, number)
    outputs.take_over(work)
    assert found(work) == ["old"] * 3
    assert len(list((work / outputs.CHECKPOINTS).iterdir())) == 3


@pytest.mark.parametrize("at", range(1, 6))
def test_a_kill_while_they_are_taken_over_loses_none(
    work: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each renaming, and at the removal of what says that all are there; the second one ends at a different place."""
    for number in range(3):
        written(work, number)
    calls = 0
    with monkeypatch.context() as patch:
        for name in ("replace", "unlink"):
            step = getattr(Path, name)

            def counted(self: Path, *given: object, step: object = step, **named: object) -> object:
                nonlocal calls
                calls += 1
                if calls == at:
                    raise Killed
                return step(self, *given, **named)  # type: ignore[operator]

            patch.setattr(Path, name, counted)
        try:
            outputs.take_over(work, complete=True)
        except Killed:
            assert at <= 4
    outputs.take_over(work)
    assert found(work) == ["new"] * 3
    assert len(list((work / outputs.CHECKPOINTS).iterdir())) == 3


def test_where_nothing_was_kept_there_is_nothing_to_take_over(tmp_path: Path) -> None:
    outputs.take_over(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of a few pages."""
    place = tmp_path / "disk"
    place.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(place)], check=False, capture_output=True
        ).returncode
    ):
        pytest.skip("a small disk needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_line_that_a_full_disk_tore_is_told_and_left_out(small: Path) -> None:
    filler = small / "filler"
    filler.write_bytes(b"x" * (3 << 12))
    told = 0
    with pytest.raises(MachineError, match=r"metrics\.jsonl cannot be written: No space left on device"):
        for step in range(1000):
            outputs.note(small, {"learner": 0, "step": step})
            told += 1
    filler.unlink()
    outputs.note(small, {"learner": 0, "step": 5000})
    assert [line["step"] for line in commands.lines(small / "metrics.jsonl")] == [*range(told), 5000]


SEVERAL = """
import os, sys
from pathlib import Path
from coresident.engines.pool.learning import outputs
children = []
for learner in range(4):
    children.append(os.fork())
    if not children[-1]:
        for step in range(1000):
            outputs.note(Path(sys.argv[1]), {"learner": learner, "step": step, "text": "long" * 75})
        os._exit(0)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


def test_lines_of_several_learners_follow_each_other(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SEVERAL, str(tmp_path)], check=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for learner in range(4):
        assert [line["step"] for line in lines if line["learner"] == learner] == list(range(1000))
