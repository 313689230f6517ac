"""NF4 as bitsandbytes has it: by its definition here, and by bitsandbytes itself where that is installed."""

from __future__ import annotations

import pytest
import torch

from coresident.engines.pool.quantised import blockwise, nf4


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype)


def test_each_number_becomes_the_nearest_value_of_its_block() -> None:
    given = weight(3, 64)
    held = nf4.quantise(given)
    table = torch.tensor(nf4.VALUES)
    packed = held.weight.reshape(-1)
    # The first number of a byte is in its upper half.
    indices = torch.stack([packed >> 4, packed & 15], 1).reshape(3, 64).long()
    scaled = given / given.abs().amax(1, keepdim=True)
    assert torch.equal(indices, (scaled[..., None] - table).abs().argmin(-1))


def test_double_quantisation_costs_a_percent_of_the_scales() -> None:
    given = weight(64, 512)
    held = nf4.quantise(given)
    assert held.absmax.dtype == torch.uint8
    assert held.form == nf4.Form((64, 512), 64, held.form.offset, 256)
    exact = given.reshape(-1, 64).abs().amax(1)
    assert torch.allclose(nf4.scales(held), exact, rtol=0.02)
    # 4 bits a number, 8 a block and 32 a block of blocks.
    assert held.nested_absmax is not None
    assert (held.weight.numel(), held.absmax.numel(), held.nested_absmax.numel()) == (16384, 512, 2)


def test_what_is_quantised_twice_is_the_same() -> None:
    once = nf4.dequantise(nf4.quantise(weight(8, 64)), torch.float32)
    again = nf4.dequantise(nf4.quantise(once), torch.float32)
    assert torch.allclose(once, again, rtol=0.02, atol=1e-4)


def test_scales_that_are_not_quantised_are_used_as_they_are() -> None:
    held = nf4.quantise(weight(2, 64))
    single = nf4.Quantised(nf4.Form((2, 64)), held.weight, torch.tensor([2.0, 3.0]), held.quant_map)
    found = nf4.dequantise(single, torch.float64)
    assert found.dtype == torch.float64
    assert found[0].abs().max() == 2.0
    assert found[1].abs().max() == 3.0


def test_a_block_of_zeros_stays_one() -> None:
    held = nf4.quantise(torch.zeros(2, 64))
    assert not nf4.dequantise(held, torch.float32).any()


@pytest.mark.parametrize("shape", [(96, 64), (33, 50), (512, 300), (7, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_and_values_are_those_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    peer = pytest.importorskip("bitsandbytes.functional")
    given = weight(*shape, dtype=dtype)
    held = nf4.quantise(given)
    packed, state = peer.quantize_4bit(given, blocksize=64, compress_statistics=True, quant_type="nf4")
    assert torch.equal(packed, held.weight)
    assert held.form.offset == pytest.approx(float(state.offset), rel=1e-6)
    # What bitsandbytes made is read as bitsandbytes reads it, bit for bit.
    form = nf4.Form(shape, 64, float(state.offset), 256)
    theirs = nf4.Quantised(form, packed, state.absmax, state.code, state.state2.absmax, state.state2.code)
    assert torch.equal(nf4.dequantise(theirs, dtype), peer.dequantize_4bit(packed, state))


def test_tables_are_those_of_bitsandbytes() -> None:
    peer = pytest.importorskip("bitsandbytes.functional")
    for signed in (True, False):
        assert torch.equal(blockwise.dynamic_map(signed=signed), peer.create_dynamic_map(signed=signed))
    assert torch.equal(torch.tensor(nf4.VALUES), peer.get_4bit_type("nf4", device="cpu"))
