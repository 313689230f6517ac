"""Scoring: hidden states meet the output layer directly where the model is just those two, and never where it is more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from coresident.engines.pool.learning import scoring
from coresident.engines.pool.learning.scoring import Scorer, log_probabilities
from coresident.engines.pool.learning.tokenized import TokenPair, collate

SIZES = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
PLAIN = {
    "llama": {},
    "qwen3": {},
    "mistral": {},
    "phi": {},
    "gemma": {},
    "granite": {"logits_scaling": 1.0},
    "cohere": {"logit_scale": 1.0},
}
CHANGED = {
    "gemma3_text": {"final_logit_softcapping": 30.0},
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.0625},
}
PAIRS = [TokenPair((5, 6, 7), (8, 9, 10), (11, 12)), TokenPair((5,), (7,), (90, 41, 3, 4, 5, 6, 7, 8))]


def built(family: str, **values: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2, **values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).eval()


def one_by_one(model: Any) -> list[float]:
    """Each completion's log-probability from the logits of the growing text alone."""
    found = []
    for side in (0, 1):
        for pair in PAIRS:
            known, total = list(pair.prompt), 0.0
            for token in pair.completions[side]:
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([known])).logits[0, -1]
                total += logits.log_softmax(0)[token].item()
                known.append(token)
            found.append(total)
    return found


@pytest.mark.parametrize(("family", "values"), PLAIN.items(), ids=PLAIN)
def test_a_plain_model_is_scored_without_logits_of_its_own(family: str, values: dict[str, Any]) -> None:
    model = built(family, **values)
    scorer = Scorer.of(model)
    assert scorer.whole == ""
    model.get_base_model().lm_head.register_forward_hook(lambda *_: pytest.fail("it made its logits"))
    scored = log_probabilities(scorer, collate(PAIRS, 32, 0))
    model.get_base_model().lm_head._forward_hooks.clear()
    assert scored.tolist() == pytest.approx(one_by_one(model), rel=1e-10)


@pytest.mark.parametrize(("family", "values"), CHANGED.items(), ids=CHANGED)
@pytest.mark.parametrize("told", [True, False], ids=["told", "found out"])
def test_a_model_that_changes_its_logits_goes_through_its_own_forward_pass(
    family: str, values: dict[str, Any], told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not told:
        # A change under a name that we do not know.
        monkeypatch.setattr(scoring, "_CHANGES", ())
    model = built(family, **values)
    scorer = Scorer.of(model)
    expected = f"its logits are changed by {next(iter(values))}" if told else "its forward pass is more than"
    assert scorer.whole.startswith(expected)
    scored = log_probabilities(scorer, collate(PAIRS, 32, 0))
    assert scored.tolist() == pytest.approx(one_by_one(model), rel=1e-10)


def test_a_trained_output_layer_is_asked_itself() -> None:
    model = built("llama")
    model.get_base_model().lm_head.weight.requires_grad_(True)
    assert Scorer.of(model).whole == "its output layer is trained"
    adapted = built("llama").get_base_model()
    wrapped = get_peft_model(adapted, LoraConfig(r=2, target_modules=["lm_head"]))
    assert Scorer.of(wrapped).whole == "its output layer is a Linear"


def test_looking_leaves_the_model_as_it_was() -> None:
    model = built("llama")
    ids = torch.tensor([[3, 4, 5]])
    before = model(input_ids=ids).logits
    Scorer.of(model)
    assert "forward" not in vars(model.get_base_model().get_decoder())
    assert torch.equal(model(input_ids=ids).logits, before)


def test_gradients_are_those_of_its_own_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for fusible in (True, False):
        model = built("llama")
        with torch.no_grad():
            for name, value in model.named_parameters():
                if ".lora_B." in name:
                    value.fill_(0.1)
        if not fusible:
            monkeypatch.setattr(scoring, "_probed", lambda *_: False)
        scorer = Scorer.of(model)
        assert (scorer.whole == "") == fusible
        log_probabilities(scorer, collate(PAIRS, 32, 0)).sum().backward()
        found.append({name: value.grad for name, value in model.named_parameters() if value.requires_grad})
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("padding", [0, 95])
def test_padding_is_never_seen(padding: int) -> None:
    scorer = Scorer.of(built("llama"))
    alone = log_probabilities(scorer, collate(PAIRS[:1], 32, 0))
    beside = log_probabilities(scorer, collate(PAIRS, 32, padding))
    assert beside[[0, 2]].tolist() == pytest.approx(alone.tolist(), rel=1e-12)
