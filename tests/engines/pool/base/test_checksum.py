"""The checksum is of the bytes a process sees: equal however the base is held, different after one flipped
bit.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from coresident.engines.pool.base import base, checksum, loading
from coresident.engines.pool.sharing import arena


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_private_arena_and_memory_agree(tiny_base: Path, dtype: str) -> None:
    directory = base.read(tiny_base)
    plan = directory.layout(dtype)
    descriptor = arena.create(plan.size)
    arena.write(descriptor, plan)
    expected = checksum.of_tensors(loading.private(directory, dtype))
    assert checksum.of_tensors(arena.attach(descriptor, plan)) == expected
    assert checksum.of_memory(arena.mapping(descriptor, plan), plan) == expected
    os.close(descriptor)


def test_mapped_agrees_too(tiny_base: Path) -> None:
    directory = base.read(tiny_base)
    assert checksum.of_tensors(loading.mapped(directory, "float32")) == checksum.of_tensors(
        loading.private(directory, "float32")
    )


def test_one_flipped_bit_is_seen(tiny_base: Path) -> None:
    tensors = loading.private(base.read(tiny_base), "float32")
    before = checksum.of_tensors(tensors)
    tensors["model.layers.1.mlp.gate_proj.weight"].view(torch.int32)[3, 5] ^= 1
    assert checksum.of_tensors(tensors) != before


def test_names_types_and_shapes_count() -> None:
    zeros = torch.zeros(4)
    sums = {
        checksum.of_tensors(tensors)
        for tensors in (
            {"a": zeros},
            {"b": zeros},
            {"a": zeros.view(2, 2)},
            {"a": torch.zeros(4, dtype=torch.int32)},
        )
    }
    assert len(sums) == 4
