"""A base in one allocation: loaded as it lies in the files, converted where asked. Here in the CPU's memory; the
same code fills a card (test_gpu_pool.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pool.base.base import read
from coresident.engines.pool.base.tensors import DEVICE_ALIGNMENT
from coresident.engines.pool.card import device
from coresident.errors import MachineError

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("piece", [64, device.PIECE])
def test_every_tensor_is_the_files(
    tiny_base: Path, tensors: Any, dtype: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "PIECE", piece)
    block = device.load(read(tiny_base).layout(dtype, DEVICE_ALIGNMENT), CPU)
    loaded, expected = block.tensors(), tensors(dtype)
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, expected[name]), name
        assert (tensor.data_ptr() - block.memory.data_ptr()) % DEVICE_ALIGNMENT == 0


def test_padding_is_zero_so_equal_bases_are_equal_bytes(tiny_base: Path) -> None:
    plan = read(tiny_base).layout("bfloat16", DEVICE_ALIGNMENT)
    memory = device.load(plan, CPU).memory.clone()
    for slot in plan.slots:
        memory[slot.offset : slot.offset + slot.size] = 0
    assert not memory.any()


def test_a_file_cut_short_is_named(tiny_base: Path, tmp_path: Path) -> None:
    for file in tiny_base.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    plan = read(tmp_path).layout("float32", DEVICE_ALIGNMENT)
    weights = tmp_path / "model.safetensors"
    with weights.open("r+b") as stream:
        stream.truncate(weights.stat().st_size - 10)
    with pytest.raises(MachineError, match=r"model\.safetensors became shorter while .* was being read"):
        device.load(plan, CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_without_a_card_the_reason_and_a_remedy_are_said() -> None:
    with pytest.raises(MachineError, match="no CUDA device can be used") as caught:
        device.start("float32")
    assert "nvidia-smi" in caught.value.remedy
    assert device.under_mps() is None
