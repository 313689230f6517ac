"""Cross-entropy in chunks is plain cross-entropy, value and gradients, with nothing of an ignored target in it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from coresident.model.cross_entropy import IGNORED, chunked, plain


def _drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(37, 24, dtype=dtype, requires_grad=True)
    table = torch.randn(61, 24, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 61, (37,))
    targets[::5] = IGNORED
    return hidden, table, targets


def test_plain_is_the_sum_of_negative_log_probabilities_of_the_targets_that_count() -> None:
    hidden, table, targets = _drawn(torch.float64)
    logs = (hidden @ table.T).softmax(-1).log()
    wanted = -sum(logs[n, target] for n, target in enumerate(targets.tolist()) if target != IGNORED)
    torch.testing.assert_close(plain(hidden, table, targets), wanted)


@pytest.mark.parametrize("rows", [1, 8, 36, 37, 1000])
def test_chunked_is_plain(rows: int) -> None:
    hidden, table, targets = _drawn(torch.float64)
    expected = plain(hidden, table, targets) * 0.3
    got = chunked(hidden, table, targets, rows) * 0.3
    torch.testing.assert_close(got, expected)
    for found, wanted in zip(
        torch.autograd.grad(got, (hidden, table)), torch.autograd.grad(expected, (hidden, table)), strict=True
    ):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("rows", [0, 8])
def test_where_nothing_counts_there_is_no_loss_and_no_gradient(rows: int) -> None:
    hidden, table, targets = _drawn()
    targets[:] = IGNORED
    total = chunked(hidden, table, targets, rows) if rows else plain(hidden, table, targets)
    assert total == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(total, (hidden, table)))


@pytest.mark.parametrize("rows", [0, 8])
def test_under_autocast_the_sum_is_float32_and_so_are_the_gradients_of_float32_weights(rows: int) -> None:
    hidden, table, targets = _drawn()
    exact = plain(hidden, table, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = chunked(hidden, table, targets, rows) if rows else plain(hidden, table, targets)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, exact, rtol=1e-2, atol=0)
    for found, wanted in zip(
        torch.autograd.grad(total, (hidden, table)), torch.autograd.grad(exact, (hidden, table)), strict=True
    ):
        assert found.dtype == torch.float32
        assert (found - wanted).norm() < 2e-2 * wanted.norm()


def test_logits_of_hundreds_do_not_overflow() -> None:
    hidden, table, targets = _drawn()
    with torch.no_grad():
        hidden *= 300
    expected, got = plain(hidden, table, targets), chunked(hidden, table, targets, 8)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got, hidden), torch.autograd.grad(expected, hidden))


def test_where_no_gradient_is_wanted_none_is_made() -> None:
    hidden, table, targets = _drawn()
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        got = chunked(hidden, table, targets, 8)
    torch.testing.assert_close(got, plain(hidden, table, targets))
    assert counted.get_total_flops() == 2 * hidden.numel() * len(table)
