"""A layout file: written whole or gone on with, checked byte by byte, refused for another model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from coresident.engines.moe.layout.file import check, open_layout, read_header
from coresident.engines.moe.layout.record import RecordFormat
from coresident.engines.moe.layout.writer import write
from coresident.engines.moe.models.checkpoint import open_checkpoint
from coresident.engines.moe.models.origins import Files
from coresident.errors import UserError

Saved = Callable[[str], Path]
FORM = RecordFormat(64, 96, "F32")


@pytest.fixture
def origin(saved: Saved) -> Files:
    """The tiny OLMoE."""
    return Files(open_checkpoint(saved("olmoe")))


class Interrupted(Files):
    """An origin that fails at its tenth expert."""

    def expert(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if (layer, expert) == (1, 2):
            raise KeyboardInterrupt
        return super().expert(layer, expert)


def test_a_record_is_where_the_header_says(origin: Files, tmp_path: Path) -> None:
    layout = write(origin, FORM, tmp_path / "experts")
    header = layout.header
    content = layout.path.read_bytes()
    assert len(content) == header.size
    for layer, expert in ((0, 0), (1, 5), (2, 7)):
        offset = header.offset(layer, expert)
        assert offset % 4096 == 0
        wanted = FORM.encode(*origin.expert(layer, expert)).numpy().tobytes()
        assert content[offset : offset + FORM.size] == wanted
    check(layout)


def test_an_interrupted_file_is_gone_on_with(
    origin: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coresident.engines.moe.layout.writer.BATCH", 4)
    out = tmp_path / "experts"
    with pytest.raises(KeyboardInterrupt):
        write(Interrupted(origin.checkpoint), FORM, out)
    assert not out.exists()
    asked: list[tuple[int, int]] = []

    class Counting(Files):
        def expert(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            asked.append((layer, expert))
            return super().expert(layer, expert)

    check(write(Counting(origin.checkpoint), FORM, out))
    # Two batches of four were on disk.
    assert asked == [(layer, expert) for layer in range(3) for expert in range(8)][8:]
    again = out.read_bytes()
    fresh = write(origin, FORM, tmp_path / "fresh").path.read_bytes()
    assert again == fresh


def test_a_torn_record_of_an_interrupted_file_is_written_again(
    origin: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coresident.engines.moe.layout.writer.BATCH", 4)
    out = tmp_path / "experts"
    with pytest.raises(KeyboardInterrupt):
        write(Interrupted(origin.checkpoint), FORM, out)
    aside = tmp_path / ".experts.partial"
    header = read_header(aside)
    with aside.open("r+b") as file:
        file.seek(header.offset(0, 3) + 100)
        file.write(b"torn")
    check(write(origin, FORM, out))


def test_a_killed_writer_loses_no_record_that_it_finished(saved: Saved, tmp_path: Path) -> None:
    """SIGKILL in the middle, several times over, then to the end."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from coresident.engines.moe.layout import writer\n"
        "from coresident.engines.moe.layout.record import RecordFormat\n"
        "from coresident.engines.moe.models.checkpoint import open_checkpoint\n"
        "from coresident.engines.moe.models.origins import Files\n"
        "writer.BATCH = 2\n"
        "def slow(done, total): print(done, flush=True); time.sleep(0.05)\n"
        f"writer.write(Files(open_checkpoint(Path({str(saved('olmoe'))!r}))), RecordFormat(64, 96, 'F32'),"
        f" Path({str(tmp_path / 'experts')!r}), slow)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while int(process.stdout.readline()) < 9:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "experts").exists()
    layout = write(Files(open_checkpoint(saved("olmoe"))), FORM, tmp_path / "experts")
    check(layout)


def test_a_wrong_byte_is_found(origin: Files, tmp_path: Path) -> None:
    layout = write(origin, FORM, tmp_path / "experts")
    with layout.path.open("r+b") as file:
        file.seek(layout.header.offset(2, 1) + FORM.payload - 1)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(
        UserError, match="layer 2, expert 1 has a bad checksum; remove it, and write it again"
    ):
        check(open_layout(layout.path))


def test_a_damaged_or_foreign_header_is_refused(origin: Files, saved: Saved, tmp_path: Path) -> None:
    layout = write(origin, FORM, tmp_path / "experts")
    content = bytearray(layout.path.read_bytes())
    content[60] ^= 1
    (tmp_path / "damaged").write_bytes(content)
    with pytest.raises(UserError, match="header's checksum is wrong"):
        open_layout(tmp_path / "damaged")
    (tmp_path / "other").write_bytes(b"not records at all" * 1000)
    with pytest.raises(UserError, match="no file of expert records"):
        open_layout(tmp_path / "other")
    (tmp_path / "short").write_bytes(layout.path.read_bytes()[:-4096])
    with pytest.raises(UserError, match="its header says"):
        open_layout(tmp_path / "short")
    with pytest.raises(UserError, match="does not exist"):
        open_layout(tmp_path / "none")
    with pytest.raises(UserError, match="experts of another model"):
        layout.belongs(open_checkpoint(saved("qwen3")).identity)
    with pytest.raises(UserError, match="a layout of another model"):
        write(Files(open_checkpoint(saved("ours"))), FORM, layout.path)


def test_two_writers_of_one_file_agree(origin: Files, tmp_path: Path) -> None:
    """The second waits for the first, and takes what it wrote."""
    out = tmp_path / "experts"
    with ThreadPoolExecutor(2) as pool:
        for layout in [job.result() for job in [pool.submit(write, origin, FORM, out) for _ in range(2)]]:
            check(layout)
    assert [path.name for path in tmp_path.iterdir()] == ["experts"]


def test_who_waited_refuses_what_is_of_another_form(origin: Files, tmp_path: Path) -> None:
    out, first, going_on = tmp_path / "experts", threading.Event(), threading.Event()

    class Slow(Files):
        def expert(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            first.set()
            assert going_on.wait(10)
            return super().expert(layer, expert)

    with ThreadPoolExecutor(2) as pool:
        job = pool.submit(write, Slow(origin.checkpoint), FORM, out)
        assert first.wait(10)
        other = pool.submit(write, origin, RecordFormat(64, 96, "F16"), out)
        time.sleep(0.1)
        going_on.set()
        check(job.result())
        with pytest.raises(UserError, match=r"a layout of another form \(F32\)"):
            other.result()


def test_who_waited_takes_what_the_other_wrote(origin: Files, tmp_path: Path) -> None:
    """The growing file is the lock, and has another name once it is free."""
    out, first, going_on = tmp_path / "experts", threading.Event(), threading.Event()
    asked: list[tuple[int, int]] = []

    class Slow(Files):
        def expert(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            asked.append((layer, expert))
            first.set()
            assert going_on.wait(10)
            return super().expert(layer, expert)

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(write, Slow(origin.checkpoint), FORM, out)]
        assert first.wait(10)
        jobs.append(pool.submit(write, Slow(origin.checkpoint), FORM, out))
        time.sleep(0.1)
        assert asked == [(0, 0)]
        going_on.set()
        for job in jobs:
            check(job.result())
    assert len(asked) == 24
    assert [path.name for path in tmp_path.iterdir()] == ["experts"]
