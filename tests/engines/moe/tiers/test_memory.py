"""Host memory is of exactly the size asked for, in huge pages where this kernel gives them, and that is read back."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from coresident import cgroup
from coresident.engines.moe.tiers import huge
from coresident.engines.moe.tiers.memory import allocate
from coresident.errors import MachineError

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


def test_a_kernel_without_huge_pages_gives_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapping(mmap.mmap):
        """As on a kernel built without them."""

        def madvise(self, *_: Any) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Mapping)
    memory = allocate(4, RECORD, pin=False)
    memory.records.fill_(1)
    assert memory.records.numel() == 4 * RECORD


def test_a_mapped_file_of_any_name_is_no_hindrance(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/mod\xe8le"
    with open(name, "w+b") as file:  # noqa: PTH123 - a name that is no text
        file.write(b"x" * mmap.PAGESIZE)
        file.flush()
        with mmap.mmap(file.fileno(), 0):
            assert allocate(1, RECORD, pin=False).huge is not None


def test_a_container_s_limit_is_told_and_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine around it may have far more."""
    monkeypatch.setattr(cgroup, "limits", lambda _: cgroup.Limits(memory=4 * RECORD, memory_free=2 * RECORD))
    assert allocate(2, RECORD, pin=False).records.numel() == 2 * RECORD
    with pytest.raises(MachineError, match=r"3,145,728 bytes .* cannot be had \(2,097,152 are available\)"):
        allocate(3, RECORD, pin=False)
