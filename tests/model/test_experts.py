"""Experts by groups compute what experts one after another do, however the tokens are spread."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coresident.model.experts import by_expert, grouped, plain

TOKENS, WIDTH, INNER, EXPERTS, TOP_K = 40, 24, 16, 6, 2


def _drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    chosen = torch.rand(TOKENS, EXPERTS).topk(TOP_K).indices
    weights = torch.rand(TOKENS, TOP_K, requires_grad=True)
    gate_up = (0.3 * torch.randn(EXPERTS, 2 * INNER, WIDTH)).to(dtype).requires_grad_()
    down = (0.3 * torch.randn(EXPERTS, WIDTH, INNER)).to(dtype).requires_grad_()
    return x, chosen, weights, gate_up, down


def _both(x: Tensor, chosen: Tensor, *weights: Tensor) -> list[tuple[Tensor, ...]]:
    found = []
    for through in (grouped, plain):
        mixed = through(x, chosen, *weights)
        # Not all ones, whose gradient would not tell rows apart.
        loss = (mixed * torch.arange(mixed.numel()).view_as(mixed).cos()).sum()
        found.append((mixed, *torch.autograd.grad(loss, (x, *weights))))
    return found


def test_groups_are_the_loop_forward_and_backward() -> None:
    for got, wanted in zip(*_both(*_drawn()), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_an_expert_without_a_token_gets_no_gradient() -> None:
    x, chosen, *weights = _drawn()
    chosen[chosen == 3] = 5
    chosen[chosen[:, 0] == chosen[:, 1]] = torch.tensor([0, 5])
    found = _both(x, chosen, *weights)
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    _, _, _, by_gate_up, by_down = found[0]
    assert not by_gate_up[3].any()
    assert not by_down[3].any()
    assert by_down[2].any()


def test_all_tokens_may_go_to_the_same_experts() -> None:
    x, chosen, *weights = _drawn()
    chosen[:] = torch.tensor([4, 1])
    for got, wanted in zip(*_both(x, chosen, *weights), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_groups_in_bfloat16_are_near_and_equal_from_run_to_run() -> None:
    drawn = _drawn(torch.bfloat16)
    got, wanted = _both(*drawn)
    for rough, exact in zip(got, wanted, strict=True):
        assert (rough - exact).norm() < 2e-2 * exact.norm()
    again, _ = _both(*drawn)
    assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))


@pytest.mark.parametrize("count", [6, 300])
def test_pairs_are_sorted_by_expert_and_found_again(count: int) -> None:
    chosen = torch.rand(TOKENS, count).topk(TOP_K).indices
    ordered, places, ends = by_expert(chosen, count)
    pairs = chosen.flatten()
    assert torch.equal(ordered, pairs.argsort(stable=True))
    assert torch.equal(ordered[places], torch.arange(TOKENS * TOP_K))
    assert torch.equal(ends, pairs.bincount(minlength=count).cumsum(0).int())
