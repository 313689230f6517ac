"""FLOPs by the formula that the published rates use, and peaks that are known or not given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from coresident.model.flops import flops_per_token, peak_flops
from coresident.model.llama import Llama
from coresident.model.presets import PRESETS
from coresident.model.shape import ModelShape


def test_a_published_rate_gives_its_published_share_of_the_peak() -> None:
    peak = peak_flops("NVIDIA GH200 480GB")
    assert peak is not None
    for name, rate, share in (("20m", 1_636_281, 0.255), ("50m", 892_838, 0.319), ("90m", 513_020, 0.342)):
        assert rate * flops_per_token(PRESETS[name]) / peak == pytest.approx(share, abs=5e-4)


def test_it_is_the_formula() -> None:
    assert flops_per_token(PRESETS["20m"]) == (
        6 * (32_000 * 320 + 8 * (4 * 320**2 + 3 * 320 * 896)) + 12 * 8 * 320 * 1024
    )


def test_of_a_mixture_only_the_experts_that_a_token_uses_count() -> None:
    assert flops_per_token(PRESETS["moe-64"]) == (
        6 * (32_000 * 512 + 16 * (4 * 512**2 + 3 * 512 * 8 * 192 + 64 * 512)) + 12 * 16 * 512 * 1024
    )


def test_it_is_what_a_step_multiplies(
    shape: ModelShape, lively: Callable[..., Llama], text: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    """Where attention is the formula in plain operations, which hides nothing and skips nothing."""
    model = lively(shape, "reference")
    with FlopCounterMode(display=False) as counted:
        loss = model.loss(*text(3, shape.context))
        torch.autograd.backward(loss.cross_entropy + loss.auxiliary)
    assert counted.get_total_flops() == loss.targets * flops_per_token(shape)


@pytest.mark.parametrize("name", ["NVIDIA H300", "NVIDIA H200 MIG 1g.18gb", "H200", ""])
def test_a_card_that_is_not_known_has_no_peak(name: str) -> None:
    assert peak_flops(name) is None


def test_the_card_we_measure_on_is_known() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
