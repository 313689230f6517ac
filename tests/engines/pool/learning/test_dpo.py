"""The loss: what a zero adapter gives, what is summed, and what turning the adapter off may not change."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from coresident.engines.pool.learning.dpo import preference, reference_log_probabilities
from coresident.engines.pool.learning.scoring import Scorer, log_probabilities
from coresident.engines.pool.learning.tokenized import Batch, TokenPair, collate
from coresident.engines.pool.parameters import DPO


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_zero_adapter_gives_exactly_ln_2_and_no_reward(build: Any, docs_batches: Any, dtype: str) -> None:
    settings = DPO(dtype=dtype, max_length=64)
    outcome = preference(Scorer.of(build(settings)), docs_batches(settings)[0], settings.beta)
    expected = torch.tensor(math.log(2.0), dtype=torch.float64 if dtype == "float64" else torch.float32)
    assert outcome.loss.item() == expected.item()
    assert outcome.chosen_rewards.tolist() == outcome.rejected_rewards.tolist() == [0.0, 0.0]
    assert outcome.accuracy.item() == 0.0


def test_log_probabilities_are_those_of_each_completion_token_given_all_before_it(build: Any) -> None:
    settings = DPO(dtype="float64")
    model = build(settings)
    pair = TokenPair((5, 6, 7), (8, 9, 10), (11, 12))
    total = log_probabilities(Scorer.of(model), collate([pair], 64, padding=1))
    for row, completion in enumerate((pair.chosen, pair.rejected)):
        known, expected = list(pair.prompt), 0.0
        for token in completion:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([known])).logits[0, -1]
            expected += logits.log_softmax(0)[token].item()
            known.append(token)
        assert total[row].item() == pytest.approx(expected, rel=1e-10)


def test_padding_and_neighbours_change_nothing(build: Any) -> None:
    settings = DPO(dtype="float64")
    model = build(settings)
    short, long = TokenPair((5, 6), (8, 9), (11,)), TokenPair((5,), tuple(range(20, 60)), (70, 71, 72))
    alone = log_probabilities(Scorer.of(model), collate([short], 64, padding=1))
    beside = log_probabilities(Scorer.of(model), collate([short, long], 64, padding=3))
    assert beside[[0, 2]].tolist() == pytest.approx(alone.tolist(), rel=1e-10)


def test_log_softmax_is_float32_on_a_bfloat16_base(build: Any, docs_batches: Any) -> None:
    settings = DPO(dtype="bfloat16", max_length=64)
    assert log_probabilities(Scorer.of(build(settings)), docs_batches(settings)[0]).dtype == torch.float32


def test_rewards_and_loss_follow_the_formula(build: Any, docs_batches: Any, disturb: Any) -> None:
    settings = DPO(dtype="float64", max_length=64, beta=0.3)
    model, batch = build(settings), docs_batches(settings)[0]
    disturb(model)
    policy = log_probabilities(Scorer.of(model), batch)
    with model.disable_adapter():
        base = log_probabilities(Scorer.of(model), batch)
    chosen, rejected = (0.3 * (policy - base)).chunk(2)
    outcome = preference(Scorer.of(model), batch, 0.3)
    assert torch.equal(outcome.chosen_rewards, chosen)
    assert torch.equal(outcome.margins, chosen - rejected)
    assert outcome.loss.item() == pytest.approx(
        sum(math.log1p(math.exp(-margin)) for margin in (chosen - rejected).tolist()) / 2, rel=1e-12
    )
    assert outcome.accuracy == (chosen > rejected).double().mean().item()


def test_leaving_the_adapters_off_restores_what_requires_grad(
    build: Any, settings: DPO, docs_batches: Any
) -> None:
    model = build(settings)
    frozen = next(name for name, value in model.named_parameters() if value.requires_grad)
    model.get_parameter(frozen).requires_grad_(False)
    before = {name: value.requires_grad for name, value in model.named_parameters()}
    preference(Scorer.of(model), docs_batches(settings)[0], 0.1)
    assert {name: value.requires_grad for name, value in model.named_parameters()} == before
    with pytest.raises(KeyError), Scorer.of(model).adapters_off():
        raise KeyError
    assert {name: value.requires_grad for name, value in model.named_parameters()} == before


def test_the_reference_is_the_base_and_has_no_graph(
    build: Any, settings: DPO, docs_batches: Any, disturb: Any
) -> None:
    model, batch = build(settings), docs_batches(settings)[0]
    scorer = Scorer.of(model)
    with torch.no_grad():
        base = log_probabilities(scorer, batch)
    disturb(model)
    reference = reference_log_probabilities(scorer, batch)
    assert not reference.requires_grad
    assert torch.equal(reference, base)
    with model.disable_adapter():
        assert torch.equal(log_probabilities(scorer, batch), base)
    assert not torch.equal(log_probabilities(scorer, batch), base)


def test_a_reference_worked_out_before_gives_the_same(
    build: Any, settings: DPO, docs_batches: Any, disturb: Any
) -> None:
    model, batch = build(settings), docs_batches(settings)[0]
    disturb(model)
    scorer = Scorer.of(model)
    now = preference(scorer, batch, 0.1)
    before = preference(scorer, batch, 0.1, reference_log_probabilities(scorer, batch))
    assert torch.equal(now.loss, before.loss)
    assert torch.equal(now.chosen_rewards, before.chosen_rewards)


def test_a_batch_counts_real_tokens_only() -> None:
    batch: Batch = collate([TokenPair((1, 2), (3,), (4, 5, 6))], 64, padding=0)
    assert batch.input_ids.tolist() == [[1, 2, 3, 0, 0], [1, 2, 4, 5, 6]]
    assert batch.completion_mask.tolist() == [[0, 0, 1, 0, 0], [0, 0, 1, 1, 1]]
    assert batch.tokens == batch.attention_mask.sum().item() == 8
