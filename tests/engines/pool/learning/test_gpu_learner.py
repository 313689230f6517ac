"""A learner's step on a card: the same code, its numbers those of the CPU within rounding, and its memory bounded."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from coresident.engines.pool.learning import logprobs
from coresident.engines.pool.learning.adapter import adapter_tensors, digest
from coresident.engines.pool.learning.learner import Learner, NonFinite
from coresident.engines.pool.learning.scoring import Scorer, log_probabilities

pytestmark = pytest.mark.gpu

CARD = torch.device("cuda")
ROWS, WIDTH, VOCABULARY = 1536, 1024, 151_936


def drawn(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    source = torch.Generator(CARD).manual_seed(0)
    hidden = torch.randn((ROWS, WIDTH), generator=source, device=CARD).to(dtype)
    weight = (0.05 * torch.randn((VOCABULARY, WIDTH), generator=source, device=CARD)).to(dtype)
    places = torch.arange(0, ROWS, 2, device=CARD)
    labels = torch.randint(VOCABULARY, (len(places),), generator=source, device=CARD)
    return hidden, places, weight, labels


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4), (torch.float64, 1e-10)]
)
def test_fused_log_probabilities_are_the_plain_ones(dtype: torch.dtype, close: float) -> None:
    hidden, places, weight, labels = drawn(dtype)
    found = []
    for fused in (True, False):
        state = hidden.clone().requires_grad_()
        if fused:
            scores = logprobs.fused(state, places, weight, None, labels)
        else:
            scores = logprobs.plain(state[places], weight, None, labels)
        scores.backward(torch.linspace(-1, 2, len(labels), device=CARD, dtype=scores.dtype))
        found.append((scores.detach(), state.grad))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=close, atol=close)
    scale = found[1][1].abs().max().item()
    torch.testing.assert_close(found[0][1], found[1][1], rtol=close, atol=close * scale)


def test_they_are_equal_from_run_to_run_and_stay_below_the_logits() -> None:
    hidden, places, weight, labels = drawn(torch.bfloat16)
    results = []
    for _ in range(3):
        state = hidden.clone().requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        scores = logprobs.fused(state, places, weight, None, labels)
        scores.sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
        results.append((scores.detach(), state.grad))
        # Half of what the logits of these rows alone would take in float32; autograd would keep them twice.
        assert peak < 3 * logprobs.BUDGET
    assert all(torch.equal(one, other) for one, other in zip(results[0], results[2], strict=True))


@pytest.fixture
def on_card(tensors: Any, build: Any) -> Any:
    def built(settings: Any) -> Any:
        return build(settings, {name: value.to(CARD) for name, value in tensors(settings.dtype).items()})

    return built


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-3), ("float64", 1e-6)])
def test_steps_on_a_card_are_those_on_the_cpu(
    on_card: Any, build: Any, settings: Any, docs_batches: Any, dtype: str, close: float
) -> None:
    settings = settings.model_copy(update={"dtype": dtype})
    batches = docs_batches(settings)
    here, there = Learner(build(settings), batches, settings), Learner(on_card(settings), batches, settings)
    for _ in range(settings.steps):
        here.step()
        there.step()
    there.settle()
    for name, values in here.series.items():
        assert there.series[name] == pytest.approx(values, rel=close, abs=close), name


@pytest.mark.parametrize("change", [{}, {"checkpointing": True}, {"reference": "precomputed"}], ids=str)
def test_a_training_on_a_card_repeats_itself(
    on_card: Any, settings: Any, docs_batches: Any, change: dict[str, Any]
) -> None:
    settings = settings.model_copy(update={"dtype": "bfloat16", **change})
    results = []
    for _ in range(2):
        learner = Learner(on_card(settings), docs_batches(settings), settings)
        for _ in range(settings.steps):
            learner.step()
        results.append((learner.series, digest(adapter_tensors(learner.model))))
    assert results[0] == results[1]


def test_a_step_waits_for_the_card_once(on_card: Any, settings: Any, docs_batches: Any) -> None:
    learner = Learner(on_card(settings), docs_batches(settings), settings)
    learner.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            learner.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # transformers looks once a forward pass whether sequences are packed, which is not ours to count.
    waits = [
        one for one in seen if "synchronizing" in str(one.message) and "transformers" not in one.filename
    ]
    assert len(waits) == 1, [f"{one.filename}:{one.lineno}" for one in waits]


def test_what_is_not_finite_is_not_applied(on_card: Any, settings: Any, docs_batches: Any) -> None:
    model = on_card(settings)
    learner = Learner(model, docs_batches(settings), settings)
    weight = next(value for name, value in model.named_parameters() if ".lora_B." in name)
    weight.register_hook(lambda gradient: gradient.fill_(float("inf")))
    before = digest(adapter_tensors(model))
    with pytest.raises(NonFinite, match="gradient norm is"):
        learner.step()
    assert digest(adapter_tensors(model)) == before


def test_scores_on_a_card_are_those_on_the_cpu(
    on_card: Any, build: Any, settings: Any, docs_batches: Any
) -> None:
    settings = settings.model_copy(update={"dtype": "float64"})
    batch = docs_batches(settings)[0]
    there = log_probabilities(Scorer.of(on_card(settings)), batch.to(CARD))
    here = log_probabilities(Scorer.of(build(settings)), batch)
    # Rotary angles are float32 in transformers whatever the model's type, and a card's sine rounds otherwise.
    assert there.tolist() == pytest.approx(here.tolist(), rel=1e-7)
