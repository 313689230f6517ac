"""A record holds an expert's weights and nothing is lost on the way, or, in 4 bits, no more than half a step."""

from __future__ import annotations

import pytest
import torch

from coresident.engines.moe.layout.record import RecordFormat, Weights, dequantise, quantise, swiglu
from coresident.errors import UserError


def drawn(width: int = 64, inner: int = 128, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """gate, up and down."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((inner, width), (inner, width), (width, inner))
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


@pytest.mark.parametrize(
    ("encoding", "dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)]
)
def test_weights_come_back_as_they_were(encoding: str, dtype: torch.dtype) -> None:
    form = RecordFormat(64, 128, encoding)  # type: ignore[arg-type]
    gate, up, down = drawn(dtype=dtype)
    record = form.encode(gate, up, down)
    assert record.numel() == form.size and form.size % 4096 == 0
    found = form.stored(torch.stack((torch.zeros_like(record), record))).expert(1, dtype)
    assert torch.equal(found.gate_up, torch.cat((gate, up)))
    assert torch.equal(found.down, down)


@pytest.mark.parametrize("encoding", ["BF16", "Q4"])
def test_a_record_is_written_over_whatever_was_there(encoding: str) -> None:
    form = RecordFormat(64, 64, encoding)  # type: ignore[arg-type]
    weights = [part[:64, :64] for part in drawn()]
    into = torch.full((form.size,), 255, dtype=torch.uint8)
    assert form.payload < form.size or encoding == "BF16"
    assert torch.equal(form.encode(*weights, into=into), form.encode(*weights))
    assert not into[form.payload :].any()


def test_published_models_have_the_published_sizes() -> None:
    """The reference figures: an expert in bfloat16, and in 4 bits with groups of 64."""
    sizes = [RecordFormat(2048, inner, kind).payload for inner in (1024, 768) for kind in ("BF16", "Q4")]  # type: ignore[arg-type]
    assert sizes == [12_582_912, 3_538_944, 9_437_184, 2_654_208]


def test_four_bits_round_to_the_nearest_of_sixteen() -> None:
    weight = torch.randn(32, 192, generator=torch.Generator().manual_seed(1))
    codes, scales = quantise(weight)
    assert codes.shape == (32, 96) and scales.shape == (2, 32, 3)
    error = (dequantise(codes, scales) - weight).abs().unflatten(1, (-1, 64))
    # Half a step, and what rounding scale and minimum to float16 adds.
    assert (error <= scales[0].float()[..., None] * 0.51 + 2e-3).all()


def test_a_constant_group_stays_constant() -> None:
    codes, scales = quantise(torch.full((1, 64), 0.25))
    assert torch.equal(dequantise(codes, scales), torch.full((1, 64), 0.25))


def test_four_bits_of_an_expert_lie_beside_their_scales() -> None:
    form = RecordFormat(64, 128, "Q4")
    gate, up, down = drawn()
    found = form.stored(form.encode(gate, up, down)[None]).expert(0, torch.float32)
    for got, wanted in ((found.gate_up, torch.cat((gate, up))), (found.down, down)):
        codes, scales = quantise(wanted)
        assert torch.equal(got, dequantise(codes, scales))


def test_rows_that_groups_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="groups of 64 do not divide rows of 64 and 96"):
        RecordFormat(64, 96, "Q4")


def test_an_expert_is_down_of_silu_gate_times_up() -> None:
    gate, up, down = drawn(8, 12)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2))
    plain = (torch.sigmoid(x @ gate.T) * (x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(swiglu(x, Weights(torch.cat((gate, up)), down)), plain)
