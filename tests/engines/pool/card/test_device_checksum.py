"""The card's checksum sees every change, wherever it is, and is the same wherever it is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coresident.engines.pool.base.base import read
from coresident.engines.pool.base.tensors import DEVICE_ALIGNMENT, Layout
from coresident.engines.pool.card import device, device_checksum


@pytest.fixture
def block(tiny_base: Path) -> device.Block:
    return device.load(read(tiny_base).layout("float32", DEVICE_ALIGNMENT), torch.device("cpu"))


def test_any_flipped_bit_changes_it(block: device.Block) -> None:
    before = device_checksum.of_block(block.memory, block.plan)
    for place in torch.randint(0, block.plan.size, (50,)).tolist():
        for bit in (1, 128):
            block.memory[place] ^= bit
            assert device_checksum.of_block(block.memory, block.plan) != before, place
            block.memory[place] ^= bit
    assert device_checksum.of_block(block.memory, block.plan) == before


def test_swapped_words_and_shifted_chunks_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checksum, "CHUNK", 16)
    words = torch.arange(1, 65, dtype=torch.int64)
    swapped = words.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert device_checksum.sums(words.view(torch.uint8)) != device_checksum.sums(swapped.view(torch.uint8))
    moved = torch.cat([words[16:32], words[:16], words[32:]])
    assert device_checksum.sums(words.view(torch.uint8)) != device_checksum.sums(moved.view(torch.uint8))


def test_a_tail_shorter_than_a_word_counts() -> None:
    memory = torch.zeros(11, dtype=torch.uint8)
    empty = device_checksum.sums(memory)
    memory[10] = 1
    assert device_checksum.sums(memory) != empty


def test_a_model_that_computes_with_another_copy_is_seen(block: device.Block) -> None:
    tensors = block.tensors()
    before = device_checksum.of_block(block.memory, block.plan, tensors)
    assert before == device_checksum.of_block(block.memory, block.plan)
    name = next(iter(tensors))
    tensors[name] = tensors[name].clone()
    assert device_checksum.strays(block.memory, block.plan, tensors) == [name]
    assert device_checksum.of_block(block.memory, block.plan, tensors) != before


def test_another_layout_of_the_same_bytes_is_another_base(block: device.Block) -> None:
    fewer = Layout(block.plan.slots[:-1], block.plan.size)
    assert device_checksum.of_block(block.memory, fewer) != device_checksum.of_block(block.memory, block.plan)
