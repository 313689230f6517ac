"""The disk's own rate, read between a decoder's steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from coresident.engines.moe import commands
from coresident.engines.moe.layout.file import LayoutFile, open_layout
from coresident.engines.moe.tiers import disk, raw
from coresident.engines.moe.tiers.disk import DiskFile
from coresident.engines.moe.tiers.host import READERS
from coresident.engines.moe.tiers.memory import allocate
from coresident.engines.moe.tiers.raw import RawReads
from coresident.errors import MachineError


@pytest.fixture
def layout(saved: Any, tmp_path: Path) -> LayoutFile:
    """The 24 records of the tiny OLMoE."""
    path = tmp_path / "records"
    commands.layout(saved("olmoe"), path, "stored", lambda *_: None)
    disk.drop([path])
    return open_layout(path)


@pytest.fixture
def buffers(layout: LayoutFile) -> list[memoryview]:
    """Fewer than there are threads: a reader waits until one is free."""
    return allocate(READERS - 2, layout.header.form.size, pin=False).buffers


@pytest.fixture
def offsets(layout: LayoutFile, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where whole records of the file were read, past the page cache."""
    seen: list[int] = []
    through = DiskFile.read

    def read(self: DiskFile, offset: int, into: memoryview) -> None:
        assert self.is_direct and len(into) == layout.header.form.size
        seen.append(offset)
        through(self, offset, into)

    monkeypatch.setattr(DiskFile, "read", read)
    return seen


def test_as_much_is_read_as_the_steps_have_fetched(layout: LayoutFile, buffers: list[memoryview]) -> None:
    size = layout.header.form.size
    reads = RawReads(layout, buffers, steps=4)
    assert reads.rate is None
    found = []
    for records in (20, 0, 3, 30, 1, 1):
        reads.follow(records * size)
        found.append(reads.nbytes // size)
    reads.close()
    # Never fewer at once than there are threads; the five too many of the third step are taken off the fourth.
    assert found == [20, 20, 28, 53, 61, 61]
    assert reads.rate == pytest.approx(reads.nbytes / reads.seconds)


def test_all_steps_together_are_bounded(
    layout: LayoutFile, buffers: list[memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = layout.header.form.size
    monkeypatch.setattr(raw, "AT_MOST", 100 * size)
    reads = RawReads(layout, buffers, steps=5)
    for _ in range(5):
        reads.follow(64 * size)
    reads.close()
    assert reads.nbytes == 100 * size


def test_every_record_has_its_turn_and_neighbours_do_not_follow_each_other(
    layout: LayoutFile, buffers: list[memoryview], offsets: list[int]
) -> None:
    size = layout.header.form.size
    reads = RawReads(layout, buffers, steps=1)
    for _ in range(3):
        reads.follow(READERS * size)
    reads.close()
    assert sorted(offsets) == [layout.header.start + place * size for place in range(24)]
    for count in (1, 2, 24, 256, 1024, 6144):
        step = raw._stride(count)
        assert math.gcd(step, count) == 1
        assert count < 8 or 0.1 * count < step % count < 0.9 * count


def test_what_was_read_is_not_in_the_page_cache(layout: LayoutFile, buffers: list[memoryview]) -> None:
    # Some of it is: the header was read.
    before = disk.cached([layout.path])
    reads = RawReads(layout, buffers, steps=1)
    reads.follow(24 * layout.header.form.size)
    reads.close()
    assert disk.cached([layout.path]) == before < 0.1


@pytest.mark.usefixtures("no_direct_reads")
def test_a_filesystem_without_direct_reads_has_no_raw_rate(
    layout: LayoutFile, buffers: list[memoryview]
) -> None:
    with pytest.raises(MachineError, match="has no O_DIRECT"):
        RawReads(layout, buffers, steps=1)
