"""Offsets are read from safetensors files as the library would; a torn file is never read as a whole one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from coresident.engines.pool.base.tensors import ALIGNMENT, encode_header, header, layout
from coresident.errors import UserError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "model.safetensors"
    save_file(
        {
            "b": torch.arange(6.0).reshape(2, 3),
            "a": torch.arange(5, dtype=torch.bfloat16),
            "c": torch.tensor([7]),
        },
        made,
    )
    return made


def test_every_tensor_lies_where_the_header_says(file: Path) -> None:
    content, expected = file.read_bytes(), load_file(file)
    for stored in header(file):
        raw = bytearray(content[stored.offset : stored.offset + stored.size])
        read = torch.frombuffer(raw, dtype=getattr(torch, stored.dtype)).reshape(stored.shape)
        assert torch.equal(read, expected[stored.name])
    assert {stored.name for stored in header(file)} == set(expected)


def test_a_layout_is_aligned_without_overlap_and_in_the_order_of_names(file: Path) -> None:
    plan = layout(header(file), "float32")
    assert [slot.name for slot in plan.slots] == ["a", "b", "c"]
    assert all(slot.offset % ALIGNMENT == 0 for slot in plan.slots)
    ends = [slot.offset + slot.size for slot in plan.slots]
    assert all(end <= following.offset for end, following in zip(ends, plan.slots[1:], strict=False))
    assert ends[-1] <= plan.size


def test_only_floating_tensors_change_their_type(file: Path) -> None:
    held = {slot.name: (slot.dtype, slot.size) for slot in layout(header(file), "float64").slots}
    assert held == {"a": ("float64", 40), "b": ("float64", 48), "c": ("int64", 8)}


def test_the_library_reads_a_header_of_ours_and_its_data_is_aligned(tmp_path: Path) -> None:
    file = tmp_path / "ours.safetensors"
    start = encode_header([("x", "float32", (3,)), ("y", "bfloat16", (2, 2))])
    assert len(start) % ALIGNMENT == 0
    x, y = torch.tensor([1.0, 2.0, 3.0]), torch.ones(2, 2, dtype=torch.bfloat16)
    file.write_bytes(start + x.numpy().tobytes() + y.view(torch.uint8).numpy().tobytes())
    read = load_file(file)
    assert torch.equal(read["x"], x)
    assert torch.equal(read["y"], y)


def _file(described: object, data: bytes) -> bytes:
    text = json.dumps(described).encode()
    return len(text).to_bytes(8, "little") + text + data


GOOD = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is torn or no safetensors file"),
        (b"PK\x03\x04 a pickle in a zip", "is torn or no safetensors file"),
        ((9).to_bytes(8, "little") + b"{not json", "a header that is not JSON"),
        (_file(GOOD, b"1234"), "is torn: "),
        (_file(GOOD, b"123456789"), "is longer than its header says"),
        (
            _file({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"12345678"),
            "a size that is not its shape's",
        ),
        (
            _file({"x": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}, b"12345678"),
            "holds x as F8_E4M3",
        ),
        (_file({"x": {"dtype": "F32"}}, b""), "describes x in a way"),
    ],
)
def test_a_file_that_is_not_whole_and_sound_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "bad.safetensors"
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.safetensors") as caught:
        header(file)
    assert said in caught.value.problem
    assert caught.value.remedy
