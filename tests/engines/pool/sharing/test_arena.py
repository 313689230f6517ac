"""The arena is filled once; from then on no process can write it, cut it or lengthen it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coresident.engines.pool.base import base
from coresident.engines.pool.base.tensors import ALIGNMENT, Layout
from coresident.engines.pool.sharing import arena
from coresident.errors import MachineError


@pytest.fixture
def plan(tiny_base: Path) -> Layout:
    return base.read(tiny_base).layout("float32")


@pytest.fixture
def filled(plan: Layout) -> Iterator[int]:
    descriptor = arena.create(plan.size)
    arena.write(descriptor, plan)
    yield descriptor
    os.close(descriptor)


def test_it_holds_the_base_aligned(filled: int, plan: Layout, tiny_base: Path) -> None:
    tensors = arena.attach(filled, plan)
    for name, tensor in load_file(tiny_base / "model.safetensors").items():
        assert torch.equal(tensors[name], tensor)
        assert tensors[name].data_ptr() % ALIGNMENT == 0


def test_the_tensors_outlive_the_descriptor(plan: Layout) -> None:
    descriptor = arena.create(plan.size)
    arena.write(descriptor, plan)
    tensors = arena.attach(descriptor, plan)
    os.close(descriptor)
    assert torch.isfinite(tensors["model.norm.weight"]).all()


def test_nobody_can_map_it_writable_or_change_its_size(filled: int, plan: Layout) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(filled, plan.size, flags=mmap.MAP_SHARED)
    for size in (0, 2 * plan.size):
        with pytest.raises(PermissionError):
            os.ftruncate(filled, size)
    with pytest.raises(PermissionError):
        os.pwrite(filled, b"x", 0)


def test_a_mapping_cannot_be_made_writable_afterwards(filled: int, plan: Layout) -> None:
    tensors = arena.attach(filled, plan)
    start = tensors[plan.slots[0].name].data_ptr()
    libc = ctypes.CDLL(None, use_errno=True)
    assert (
        libc.mprotect(
            ctypes.c_void_p(start), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE
        )
        == -1
    )


def test_a_learners_descriptor_is_for_reading_only(plan: Layout) -> None:
    # Without seals this alone keeps a learner from writing.
    descriptor = arena.create(plan.size)
    readable = arena.reading(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(readable, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(readable, plan.size, flags=mmap.MAP_SHARED)
    os.close(descriptor)
    os.close(readable)


def test_memory_that_cannot_be_had_is_out_of_memory() -> None:
    with pytest.raises(MemoryError, match="an arena of"):
        arena.create(1 << 62)


def test_an_arena_of_another_base_is_refused(plan: Layout) -> None:
    descriptor = arena.create(plan.size // 2)
    with pytest.raises(MachineError, match="where the base has"):
        arena.attach(descriptor, plan)
    os.close(descriptor)
