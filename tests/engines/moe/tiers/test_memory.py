"""Host memory is of exactly the size asked for, in huge pages where this kernel gives them, and that is read back."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from coresident.engines.moe.tiers import huge
from coresident.engines.moe.tiers.memory import allocate

RECORD = 1 << 20
_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def gives_huge_pages() -> bool:
    return _MODE.exists() and "[never]" not in _MODE.read_text(encoding="utf-8")


def test_an_arena_lies_in_huge_pages_and_says_so() -> None:
    memory = allocate(64, RECORD, pin=False)
    memory.records.fill_(1)
    found = memory.huge
    assert found is not None
    # The kernel gives what it has: on a machine whose memory is in pieces less than all.
    assert (found > 0.5) if gives_huge_pages() else (found == 0)
    assert memory.records.numel() == 64 * RECORD


def test_small_pages_are_not_called_huge() -> None:
    mapping = mmap.mmap(-1, 8 * RECORD, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    whole.fill_(1)
    assert huge.share(whole.data_ptr(), whole.numel()) == 0


@pytest.mark.parametrize("place", [0, 1 << 46])
def test_where_nothing_is_mapped_there_is_no_share(place: int) -> None:
    assert huge.share(place, mmap.PAGESIZE) is None
