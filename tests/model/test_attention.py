"""Attention: every kernel computes the reference, and the reference is differentiable as often as one likes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from coresident.errors import MachineError, UserError
from coresident.model.attention import AttentionKernel, attend, check_kernel, dispatched, reference
from coresident.model.shape import ModelShape

SHAPE = ModelShape(vocabulary=61, layers=1, width=32, heads=2, feedforward=40, context=16)
CPU = torch.device("cpu")


def _drawn(dtype: torch.dtype, length: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(2, 2, length, 4, dtype=dtype, requires_grad=True) for _ in range(3))
    return query, key, value


def test_the_references_first_derivatives_are_right() -> None:
    assert gradcheck(reference, _drawn(torch.float64))


def test_the_references_second_derivatives_are_right() -> None:
    assert gradgradcheck(reference, _drawn(torch.float64))


def test_the_reference_keeps_float64() -> None:
    query, key, value = _drawn(torch.float64)
    scores = (query @ key.transpose(-2, -1) / 2).exp().tril()
    wanted = scores / scores.sum(-1, keepdim=True) @ value
    torch.testing.assert_close(reference(query, key, value), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", ["auto", "flash"])
def test_a_fused_kernel_computes_the_reference_forward_and_backward(kernel: AttentionKernel) -> None:
    drawn = _drawn(torch.float32, length=33)
    found = []
    for one in (kernel, "reference"):
        mixed = attend(one, *drawn)
        found.append((mixed, *torch.autograd.grad(mixed.square().sum(), drawn)))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_no_position_sees_a_later_one() -> None:
    query, key, value = _drawn(torch.float32, length=9)
    for kernel in ("auto", "flash", "reference"):
        before = attend(kernel, query, key, value)
        with torch.no_grad():
            changed_key, changed_value = key.clone(), value.clone()
            changed_key[:, :, 6:] += 1
            changed_value[:, :, 6:] += 1
        after = attend(kernel, query, changed_key, changed_value)
        assert torch.equal(before[:, :, :6], after[:, :, :6])
        assert not torch.allclose(before[:, :, 6:], after[:, :, 6:])


def test_a_forced_kernel_that_cannot_run_is_an_error() -> None:
    with pytest.raises(
        MachineError, match=r"the cudnn attention kernel cannot run for torch\.float32 heads of 4"
    ):
        attend("cudnn", *_drawn(torch.float32))
    with pytest.raises(MachineError, match="set the attention kernel to auto"):
        check_kernel("cudnn", SHAPE, CPU, torch.bfloat16)


def test_asking_first_passes_for_what_can_run() -> None:
    for kernel in ("auto", "flash", "reference"):
        check_kernel(kernel, SHAPE, CPU, torch.bfloat16)


def test_an_unknown_kernel_is_told_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'flash'"):
        check_kernel("flesh", SHAPE, CPU, torch.bfloat16)  # type: ignore[arg-type]


def test_it_says_what_really_runs() -> None:
    assert dispatched("reference", SHAPE, CPU, torch.float32) == "reference"
    assert dispatched("flash", SHAPE, CPU, torch.float32) == "flash"
    # What PyTorch takes on a CPU by itself; it falls back to `math` where no fused kernel can run.
    assert dispatched("auto", SHAPE, CPU, torch.float32) == "flash"
    with pytest.raises(MachineError, match="cudnn"):
        dispatched("cudnn", SHAPE, CPU, torch.float32)
