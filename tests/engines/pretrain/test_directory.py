"""A training's directory is one process's at a time, and tells each update once."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from coresident import whole
from coresident.engines.pretrain import directory
from coresident.engines.pretrain.directory import METRICS, RUN, Rows, lines, locked
from coresident.engines.pretrain.parameters import Train
from coresident.errors import MachineError, UserError


def described(out: Path) -> None:
    out.mkdir()
    whole.write_json(out / RUN, {"parameters": Train().model_dump(mode="json")})


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    """By another process: the one that would corrupt it."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom coresident.engines.pretrain.directory import locked\n"
        "with locked(Path(sys.argv[1]), True):\n    print('in', flush=True)\n    sys.stdin.read()\n"
    )
    out = tmp_path / "run"
    described(out)
    holder = subprocess.Popen(
        [sys.executable, "-c", code, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None and holder.stdout is not None
    assert holder.stdout.readline() == b"in\n"
    with pytest.raises(MachineError, match="another process is training into"), locked(out, resume=True):
        pass
    holder.stdin.close()
    assert holder.wait(20) == 0
    holder.stdout.close()
    with locked(out, resume=True):
        pass


def test_a_training_is_neither_overwritten_nor_invented(tmp_path: Path) -> None:
    described(tmp_path / "run")
    with (
        pytest.raises(UserError, match="holds a training already") as refused,
        locked(tmp_path / "run", resume=False),
    ):
        pass
    assert "--resume" in refused.value.remedy
    with pytest.raises(UserError, match="holds no training"), locked(tmp_path / "none", resume=True):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is no directory"), locked(tmp_path / "file", resume=False):
        pass


def test_a_directory_of_others_is_left_alone_and_a_new_one_goes_where_nothing_was_written(
    tmp_path: Path,
) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "thesis.txt").touch()
    with (
        pytest.raises(UserError, match=r"holds 'thesis.txt' and no training"),
        locked(tmp_path / "others", resume=False),
    ):
        pass
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        with locked(tmp_path / name, resume=False):
            assert (tmp_path / name).is_dir()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["empty", "others"]
    with locked(tmp_path / "new", resume=False):
        (tmp_path / "new" / RUN).touch()
    assert (tmp_path / "new" / RUN).exists()


@pytest.mark.parametrize("text", ["", "{}", '{"parameters": {"preset": 3}}', "[1]"])
def test_a_damaged_description_is_said_so(tmp_path: Path, text: str) -> None:
    (tmp_path / RUN).write_text(text)
    with pytest.raises(UserError, match=r"run\.json cannot be used"):
        directory.saved(tmp_path)


def test_rows_after_the_checkpoint_are_taken_out_before_they_are_written_again(tmp_path: Path) -> None:
    rows = Rows(tmp_path, 0)
    rows.add([{"update": 1, "loss": 3.0}, {"update": 2, "loss": 2.0}, {"update": 2, "window": 2}])
    rows.add(
        [
            {"update": 2, "validation": {}},
            {"update": 2, "validation": {}, "final": True},
            {"update": 3, "loss": 1.0},
        ]
    )
    with (tmp_path / METRICS).open("a") as stream:
        stream.write('{"update": 4, "lo')
    Rows(tmp_path, 2).add([{"update": 3, "loss": 1.5}])
    assert lines(tmp_path / METRICS) == [
        {"update": 1, "loss": 3.0},
        {"update": 2, "loss": 2.0},
        {"update": 2, "window": 2},
        {"update": 2, "validation": {}},
        {"update": 3, "loss": 1.5},
    ]


def test_a_disk_that_takes_a_part_of_a_row_keeps_whole_rows_and_says_so(tmp_path: Path) -> None:
    """A real limit on file size: the kernel takes what fits below it, and refuses only the next write."""
    rows = Rows(tmp_path, 0)
    rows.add([{"update": 1, "loss": 3.0}])
    before = (tmp_path / METRICS).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
    try:
        with pytest.raises(MachineError, match=r"metrics\.jsonl cannot be written: File too large"):
            rows.add([{"update": 2, "loss": 2.0}, {"update": 3, "loss": 1.0}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / METRICS).read_bytes() == before
    rows.add([{"update": 2, "loss": 2.0}])
    assert [row["update"] for row in lines(tmp_path / METRICS)] == [1, 2]


@pytest.mark.parametrize("torn", ['{"update": 2, "lo', "[2]", '{"loss": 2.0}', '{"update": "2"}', "\udcff"])
def test_a_line_that_is_no_row_is_named(tmp_path: Path, torn: str) -> None:
    whole = '{"update": 1, "loss": 3.0}\n'
    content = f"{whole}{torn}\n{whole}".encode(errors="surrogateescape")
    (tmp_path / METRICS).write_bytes(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2 is no row"):
        Rows(tmp_path, 1)
    assert (tmp_path / METRICS).read_bytes() == content


def test_what_is_not_finite_is_not_written(tmp_path: Path) -> None:
    rows = Rows(tmp_path, 0)
    with pytest.raises(ValueError, match="Out of range"):
        rows.add([{"update": 1, "loss": float("nan")}])
    assert lines(tmp_path / METRICS) == []
    assert json.dumps(lines(tmp_path / METRICS)) == "[]"


def test_a_training_that_began_and_ended_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    acquire = FileLock.acquire

    def late(self: FileLock, *given: Any, **more: Any) -> Any:
        whole.write_json(out / RUN, {"parameters": Train().model_dump(mode="json")})
        return acquire(self, *given, **more)

    monkeypatch.setattr(FileLock, "acquire", late)
    with pytest.raises(UserError, match="holds a training already"), locked(out, resume=False):
        pass
    monkeypatch.undo()
    with locked(out, resume=True):
        pass


def test_what_a_kill_left_of_a_file_that_was_being_written_is_cleared(tmp_path: Path) -> None:
    out = tmp_path / "run"
    described(out)
    for name in (".metrics.jsonl.123", ".run.json.4"):
        (out / name).touch()
    with locked(out, resume=True):
        assert sorted(one.name for one in out.iterdir()) == [".lock", RUN]
