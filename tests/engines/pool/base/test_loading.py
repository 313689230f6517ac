"""A private base is a copy in anonymous memory; a mapped base is the file itself, and cannot be written."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from coresident.engines.pool.base import base, loading
from coresident.engines.pool.base.tensors import ALIGNMENT, Stored
from coresident.engines.pool.sharing import sharing
from coresident.errors import MachineError, UserError


def test_a_private_base_has_the_files_values_aligned(tiny_base: Path) -> None:
    tensors = loading.private(base.read(tiny_base), "float32")
    expected = load_file(tiny_base / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name])
        assert tensor.data_ptr() % ALIGNMENT == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_private_base_is_converted_as_torch_converts(tiny_base: Path, dtype: str) -> None:
    tensors = loading.private(base.read(tiny_base), dtype)
    kind = getattr(torch, dtype)
    for name, tensor in load_file(tiny_base / "model.safetensors").items():
        assert torch.equal(tensors[name], tensor.to(kind))


def test_a_private_base_is_this_processs_own_and_writable(tiny_base: Path) -> None:
    tensors = loading.private(base.read(tiny_base), "float32")
    seen = sharing.held(loading.ranges(tensors).values())
    assert seen.private == seen.resident == seen.size
    tensors["model.norm.weight"].add_(1)


def test_a_mapped_base_is_the_files_pages(tiny_base: Path) -> None:
    tensors = loading.mapped(base.read(tiny_base), "float32")
    expected = load_file(tiny_base / "model.safetensors")
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert sharing.held(loading.ranges(tensors).values()).private == 0


def test_a_write_into_a_mapped_base_kills_the_writer_alone(tiny_base: Path) -> None:
    before = (tiny_base / "model.safetensors").read_bytes()
    tensors = loading.mapped(base.read(tiny_base), "float32")
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        tensors["model.norm.weight"].add_(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    assert (tiny_base / "model.safetensors").read_bytes() == before


def test_a_mapping_does_not_convert(tiny_base: Path) -> None:
    with pytest.raises(UserError, match=r"mapped cannot convert .*model\.safetensors") as caught:
        loading.mapped(base.read(tiny_base), "bfloat16")
    assert "dtype: float32" in caught.value.remedy


def test_several_files_become_one_allocation(tiny_base: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_base, tmp_path / "base"))
    expected = load_file(directory / "model.safetensors")
    names = sorted(expected)
    (directory / "model.safetensors").unlink()
    for file, members in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: expected[name] for name in members}, directory / file)
    placed = dict.fromkeys(names[::2], "a.safetensors") | dict.fromkeys(names[1::2], "b.safetensors")
    (directory / base.INDEX).write_text(f'{{"weight_map": {str(placed).replace(chr(39), chr(34))}}}')
    for load in (loading.private, loading.mapped):
        tensors = load(base.read(directory), "float32")
        assert all(torch.equal(tensors[name], expected[name]) for name in names)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tiny_base: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_base, tmp_path / "base"))
    described = base.read(directory)
    os.truncate(directory / "model.safetensors", 5000)
    with pytest.raises(MachineError, match="became shorter"):
        loading.private(described, "float32")


def test_a_copy_that_cannot_be_had_is_out_of_memory(tiny_base: Path) -> None:
    huge = Stored("w", tiny_base / "model.safetensors", "float32", (1 << 47,), 0, 1 << 49)
    with pytest.raises(MemoryError, match="a private base of"):
        loading.private(base.BaseDir(tiny_base, (huge,), "float32", {}), "float32")
