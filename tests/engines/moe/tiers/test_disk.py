"""Reads past the page cache, wherever bytes lie; and what is in the page cache, as the kernel says it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from coresident.engines.moe.tiers import disk
from coresident.engines.moe.tiers.disk import DiskFile
from coresident.errors import MachineError

SIZE = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of a megabyte and a bit."""
    path = tmp_path / "data"
    path.write_bytes(os.urandom(SIZE + 123))
    return path


@pytest.mark.parametrize("offset", [0, 4096, 1, 4095, 123_457])
@pytest.mark.parametrize("size", [4096, 1, 8191, 40_000])
@pytest.mark.parametrize("direct", [True, False])
def test_any_range_is_read_whichever_way(file: Path, offset: int, size: int, direct: bool) -> None:
    opened = DiskFile(file, direct)
    into = bytearray(size)
    opened.read(offset, memoryview(into))
    assert bytes(into) == file.read_bytes()[offset : offset + size]
    assert opened.is_direct == direct
    opened.close()


def test_the_file_s_end_is_read_past_the_last_whole_block(file: Path) -> None:
    opened = DiskFile(file, direct=True)
    into = bytearray(100)
    opened.read(SIZE + 23, memoryview(into))
    assert bytes(into) == file.read_bytes()[-100:]
    with pytest.raises(MachineError, match="ended at byte"):
        opened.read(SIZE + 24, memoryview(into))


def test_direct_reads_leave_the_page_cache_alone(file: Path) -> None:
    disk.drop([file])
    assert disk.cached([file]) == 0.0
    opened = DiskFile(file, direct=True)
    with mmap.mmap(-1, SIZE) as buffer:
        opened.read(0, memoryview(buffer))
    # Whole blocks into whole pages: nothing was copied through the kernel.
    assert disk.cached([file]) == 0.0
    DiskFile(file, direct=False).read(0, memoryview(bytearray(SIZE)))
    assert disk.cached([file]) > 0.9
    disk.drop([file])
    disk.warm([file])
    assert disk.cached([file]) == 1.0


def test_a_filesystem_without_direct_reads_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """proc is one: the kernel answers EINVAL, as overlay or network filesystems do."""
    with pytest.raises(MachineError, match="has no O_DIRECT") as refused:
        DiskFile(Path("/proc/self/status"), direct=True)
    assert "page-cache" in refused.value.remedy
