"""The loss: what a zero adapter gives, what is summed, and what turning the adapter off may not change."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from coresident.engines.pool.dpo import adapters_off, log_probabilities, preference
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.tokenized import Batch, TokenPair, collate


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_zero_adapter_gives_exactly_ln_2_and_no_reward(build: Any, docs_batches: Any, dtype: str) -> None:
    settings = DPO(dtype=dtype, max_length=64)
    outcome = preference(build(settings), docs_batches(settings)[0], settings.beta)
    expected = torch.tensor(math.log(2.0), dtype=torch.float64 if dtype == "float64" else torch.float32)
    assert outcome.loss.item() == expected.item()
    assert outcome.chosen_rewards.tolist() == outcome.rejected_rewards.tolist() == [0.0, 0.0]
    assert outcome.accuracy == 0.0


def test_log_probabilities_are_those_of_each_completion_token_given_all_before_it(build: Any) -> None:
    settings = DPO(dtype="float64")
    model = build(settings)
    pair = TokenPair((5, 6, 7), (8, 9, 10), (11, 12))
    total = log_probabilities(model, collate([pair], 64, padding=1))
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
    alone = log_probabilities(model, collate([short], 64, padding=1))
    beside = log_probabilities(model, collate([short, long], 64, padding=3))
    assert beside[[0, 2]].tolist() == pytest.approx(alone.tolist(), rel=1e-10)


def test_log_softmax_is_float32_on_a_bfloat16_base(build: Any, docs_batches: Any) -> None:
    settings = DPO(dtype="bfloat16", max_length=64)
    assert log_probabilities(build(settings), docs_batches(settings)[0]).dtype == torch.float32


def test_rewards_and_loss_follow_the_formula(build: Any, docs_batches: Any, disturb: Any) -> None:
    settings = DPO(dtype="float64", max_length=64, beta=0.3)
    model, batch = build(settings), docs_batches(settings)[0]
    disturb(model)
    policy = log_probabilities(model, batch)
    with model.disable_adapter():
        base = log_probabilities(model, batch)
    chosen, rejected = (0.3 * (policy - base)).chunk(2)
    outcome = preference(model, batch, 0.3)
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
    preference(model, docs_batches(settings)[0], 0.1)
    assert {name: value.requires_grad for name, value in model.named_parameters()} == before
    with pytest.raises(KeyError), adapters_off(model):
        raise KeyError
    assert {name: value.requires_grad for name, value in model.named_parameters()} == before


def test_the_reference_is_the_base_and_has_no_graph(
    build: Any, settings: DPO, docs_batches: Any, disturb: Any
) -> None:
    model, batch = build(settings), docs_batches(settings)[0]
    with torch.no_grad():
        base = log_probabilities(model, batch)
    disturb(model)
    with adapters_off(model), torch.no_grad():
        reference = log_probabilities(model, batch)
    assert torch.equal(reference, base)
    assert not torch.equal(log_probabilities(model, batch), base)


def test_a_model_that_cannot_keep_only_some_logits_gives_the_same(
    build: Any, docs_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = DPO(dtype="float64", max_length=64)
    model, batch = build(settings), docs_batches(settings)[0]
    kept = log_probabilities(model, batch)
    base = model.get_base_model()
    whole = base.forward

    def forward(input_ids: Any = None, attention_mask: Any = None, use_cache: Any = None, **rest: Any) -> Any:
        assert "logits_to_keep" not in rest
        return whole(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)

    monkeypatch.setattr(base, "forward", forward)
    assert log_probabilities(model, batch).tolist() == pytest.approx(kept.tolist(), rel=1e-12)


def test_a_batch_counts_real_tokens_only() -> None:
    batch: Batch = collate([TokenPair((1, 2), (3,), (4, 5, 6))], 64, padding=0)
    assert batch.input_ids.tolist() == [[1, 2, 3, 0, 0], [1, 2, 4, 5, 6]]
    assert batch.completion_mask.tolist() == [[0, 0, 1, 0, 0], [0, 0, 1, 1, 1]]
    assert batch.tokens == batch.attention_mask.sum().item() == 8
