"""AdamW with a clip that rejects what is not finite, against PyTorch's plain one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coresident.engines.pretrain.optimiser import ClippedAdamW
from coresident.engines.pretrain.parameters import Optimiser

SETTINGS = Optimiser(learning_rate=0.1, beta2=0.95, weight_decay=0.3, clip=1.0)
FINITE = torch.tensor(1.0)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(5, 3))
        self.norm = nn.Parameter(torch.ones(7))


def gradients(model: nn.Module, step: int, scale: float) -> None:
    source = torch.Generator().manual_seed(step)
    for one in model.parameters():
        one.grad = torch.randn(one.shape, generator=source) * scale


@pytest.mark.parametrize("clip", [1.0, 0.25])
@pytest.mark.parametrize("scale", [0.01, 0.05, 10.0])
def test_it_is_adamw_with_a_clipped_norm_and_decay_on_matrices_only(scale: float, clip: float) -> None:
    ours, plain = Small(), Small()
    optimiser = ClippedAdamW(ours, SETTINGS.model_copy(update={"clip": clip}))
    oracle = torch.optim.AdamW(
        [{"params": [plain.matrix], "weight_decay": 0.3}, {"params": [plain.norm], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        foreach=False,
    )
    for step in range(1, 9):
        # Sizes that vary: Adam does not see a factor that all gradients share.
        gradients(ours, step, scale * step)
        gradients(plain, step, scale * step)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), clip)
        for group in oracle.param_groups:
            group["lr"] = 0.1 / step
        oracle.step()
        assert optimiser.step(step, 0.1 / step, FINITE) == pytest.approx(float(norm))
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert optimiser.rejected == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_gradient_that_is_not_finite_moves_nothing_then_or_later(value: float) -> None:
    model = Small()
    optimiser = ClippedAdamW(model, SETTINGS)
    gradients(model, 1, 1.0)
    optimiser.step(1, 0.1, FINITE)
    weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    moments = {name: one.clone() for name, one in optimiser.state().items()}
    gradients(model, 2, 1.0)
    model.matrix.grad[4, 2] = value  # type: ignore[index]
    optimiser.step(2, 0.1, FINITE)
    gradients(model, 3, 1.0)
    optimiser.step(3, 0.1, FINITE)
    for name, one in model.named_parameters():
        assert torch.equal(one, weights[name]), name
    for name, one in optimiser.state().items():
        assert torch.equal(one, moments[name]), name
    assert optimiser.rejected == 2


def test_a_loss_that_is_not_finite_is_rejected_too() -> None:
    model = Small()
    optimiser = ClippedAdamW(model, SETTINGS)
    before = model.matrix.detach().clone()
    gradients(model, 1, 1.0)
    optimiser.step(1, 0.1, torch.tensor(float("inf")))
    assert torch.equal(model.matrix, before)
    assert optimiser.rejected == 1


def test_gradients_that_keep_their_memory_give_the_same_and_start_from_zero() -> None:
    ours, plain = Small(), Small()
    first, second = ClippedAdamW(ours, SETTINGS, in_place=True), ClippedAdamW(plain, SETTINGS)
    places = [one.grad.data_ptr() for one in ours.parameters() if one.grad is not None]
    for step in (1, 2, 3):
        gradients(plain, step, 1.0)
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            one.grad += other.grad
        first.step(step, 0.1, FINITE)
        second.step(step, 0.1, FINITE)
        assert [one.grad.data_ptr() for one in ours.parameters() if one.grad is not None] == places
    assert torch.equal(ours.matrix, plain.matrix) and torch.equal(ours.norm, plain.norm)


def test_a_restored_state_goes_on_bit_for_bit() -> None:
    whole, parted = Small(), Small()
    first, second = ClippedAdamW(whole, SETTINGS), ClippedAdamW(parted, SETTINGS)
    for step in (1, 2):
        gradients(whole, step, 1.0)
        first.step(step, 0.1, FINITE)
    gradients(parted, 1, 1.0)
    second.step(1, 0.1, FINITE)
    third = ClippedAdamW(parted, SETTINGS)
    third.restore({name: one.clone() for name, one in second.state().items()})
    gradients(parted, 2, 1.0)
    third.step(2, 0.1, FINITE)
    assert torch.equal(whole.matrix, parted.matrix)
    assert third.state().keys() == first.state().keys()
    assert all(torch.equal(one, first.state()[name]) for name, one in third.state().items())
