"""Fused log-probabilities: the plain ones, without the logits of all positions ever being there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coresident.engines.pool.learning import logprobs

ROWS, WIDTH, VOCABULARY, SCORED = 23, 12, 37, 17
# From one chunk for all down to one row each.
BUDGETS = [logprobs.BUDGET, 8 * VOCABULARY * 5, 1]


def drawn(dtype: torch.dtype, bias: bool = True) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(3)
    hidden = torch.randn((ROWS, WIDTH), generator=source).to(dtype)
    weight = torch.randn((VOCABULARY, WIDTH), generator=source).to(dtype)
    offset = torch.randn(VOCABULARY, generator=source).to(dtype) if bias else None
    places = torch.randperm(ROWS, generator=source)[:SCORED]
    labels = torch.randint(VOCABULARY, (SCORED,), generator=source)
    return hidden, places, weight, offset, labels


def both(dtype: torch.dtype, budget: int, bias: bool = True) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Scores and hidden gradients: the plain ones and the fused ones, each row with a gradient of its own."""
    hidden, places, weight, offset, labels = drawn(dtype, bias)
    upstream = torch.linspace(-2, 3, SCORED)
    found = []
    for one in (
        lambda state: logprobs.plain(state[places], weight, offset, labels),
        lambda state: logprobs.fused(state, places, weight, offset, labels, budget),
    ):
        state = hidden.clone().requires_grad_()
        scores = one(state)
        scores.backward(upstream.to(scores.dtype))
        found.append((scores.detach(), state.grad))
    return found


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)]
)
def test_scores_and_gradients_are_the_plain_ones(
    dtype: torch.dtype, close: float, bias: bool, budget: int
) -> None:
    plain, fused = both(dtype, budget, bias)
    torch.testing.assert_close(fused[0], plain[0], rtol=close, atol=close)
    torch.testing.assert_close(fused[1], plain[1], rtol=close, atol=close * plain[1].abs().max().item())
    assert fused[0].dtype == torch.promote_types(dtype, torch.float32)
    assert fused[1].dtype == dtype


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_gradient_is_the_derivative(budget: int) -> None:
    hidden, places, weight, offset, labels = drawn(torch.float64)
    hidden.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda state: logprobs.fused(state, places, weight, offset, labels, budget), (hidden,)
    )


def test_it_is_equal_from_run_to_run_and_with_or_without_a_gradient() -> None:
    first, again = (both(torch.float32, BUDGETS[1])[1] for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    hidden, *rest = drawn(torch.float32)
    assert torch.equal(logprobs.fused(hidden, *rest, BUDGETS[1]), first[0])


def test_near_certainty_keeps_its_gradient() -> None:
    """The probability of the label rounds to one in bfloat16; what is missing to one is all the gradient."""
    weight = torch.tensor([[8.0], [0.0]], dtype=torch.bfloat16)
    hidden = torch.ones((1, 1), dtype=torch.bfloat16, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.int64)
    logprobs.fused(hidden, zero, weight, None, zero).sum().backward()
    assert hidden.grad.item() == pytest.approx(8 * (1 - torch.tensor(8.0).sigmoid().item()), rel=1e-2)


def test_no_more_than_a_chunk_of_logits_is_ever_there(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    whole = logprobs.log_softmax

    def watched(logits: Any) -> Any:
        seen.append(logits.numel() * 4)
        return whole(logits)

    monkeypatch.setattr(logprobs, "log_softmax", watched)
    budget = VOCABULARY * 4 * 5
    hidden, *rest = drawn(torch.float32)
    logprobs.fused(hidden.requires_grad_(), *rest, budget).sum().backward()
    assert max(seen) <= budget
    assert sum(seen) == SCORED * VOCABULARY * 4, "each row's logits are made once, backward pass included"


def test_chunks_are_even_and_within_the_budget() -> None:
    table = 152_000
    assert logprobs.chunk_rows(300, table, 4) == 300
    size = logprobs.chunk_rows(1020, table, 4)
    assert size * table * 4 <= logprobs.BUDGET
    assert size % 64 == 0
    assert 1020 / 3 <= size < 1020 / 3 + 64
    assert logprobs.chunk_rows(0, table, 4) == 1
    assert logprobs.chunk_rows(7, table, 4, budget=1) == 1
