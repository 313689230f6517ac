"""TRL's SFTTrainer is the peer for the other loss: on one batch, in float64, tokens, labels, loss and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pool.learning.scoring import Scorer
from coresident.engines.pool.learning.sft import imitation
from coresident.engines.pool.learning.tokenized import Batch, collate, tokenize
from coresident.engines.pool.parameters import DPO
from coresident.text import arithmetic, pythondocs, tokenizer
from coresident.text.samples import Sample

SETTINGS = DPO(loss="sft", dtype="float64", max_length=48, rank=4, alpha=8.0)
ASKED = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 4 + 1?"})
TOLD = ({"role": "assistant", "content": "It is 5."},)
MADE = pythondocs.pairs(3, 100, SETTINGS.max_length) + arithmetic.pairs(2, 100)
FORMS = {
    "prompts": [*(Sample(pair.prompt, pair.chosen) for pair in MADE), Sample("This is the sta", "tement.")],
    "chat prompts": [Sample(ASKED, TOLD), Sample(ASKED[1:], TOLD)],
    "chats": [Sample(None, (*ASKED, *TOLD)), Sample(None, (*ASKED[1:], *TOLD))],
    "texts": [Sample(None, f"{pair.prompt}{pair.chosen}") for pair in MADE],
}


def row(sample: Sample) -> dict[str, Any]:
    """The line of TRL's file that the sample is."""

    def plain(side: Any) -> Any:
        return side if isinstance(side, str) else list(side)

    if sample.prompt is not None:
        return {"prompt": plain(sample.prompt), "completion": plain(sample.completion)}
    return {"text" if isinstance(sample.completion, str) else "messages": plain(sample.completion)}


@pytest.fixture
def trainer_of(tiny_base: Path, tmp_path: Path) -> Any:
    """Makes an SFTTrainer over the tiny base in float64, for given samples."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    def made(samples: list[Sample]) -> Any:
        return SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float64),
            args=SFTConfig(
                output_dir=str(tmp_path),
                max_length=SETTINGS.max_length,
                report_to="none",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_list([row(sample) for sample in samples]),
            processing_class=tokenizer.load(tiny_base),
            peft_config=LoraConfig(
                task_type="CAUSAL_LM",
                r=SETTINGS.rank,
                lora_alpha=SETTINGS.alpha,
                target_modules=list(SETTINGS.targets),
            ),
        )

    return made


def our_batch(samples: list[Sample], base: Path) -> Batch:
    tokenized = tokenize(samples, tokenizer.load(base), SETTINGS)
    return collate(tokenized.pairs, SETTINGS.max_length, tokenized.padding)


@pytest.mark.parametrize("samples", FORMS.values(), ids=FORMS)
def test_tokens_and_labels_are_trls(trainer_of: Any, tiny_base: Path, samples: list[Sample]) -> None:
    trainer = trainer_of(samples)
    theirs = trainer.data_collator(list(trainer.train_dataset))
    ours = our_batch(samples, tiny_base)
    assert torch.equal(ours.input_ids, theirs["input_ids"])
    labels = ours.input_ids.masked_fill(~ours.completion_mask.bool(), -100)
    assert torch.equal(labels[:, 1:], theirs["labels"][:, 1:])
    assert ours.labels.tolist() == [label for label in labels[:, 1:].flatten().tolist() if label != -100]


def double_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL scores the head in float32 whatever the model's dtype; after this in the model's, nothing else changed."""
    from trl.trainer import utils

    class DoubleHead:
        @staticmethod
        def apply(hidden: Any, weight: Any, bias: Any, labels: Any, *rest: Any) -> tuple[Any, ...]:
            logits = torch.nn.functional.linear(hidden, weight, bias)
            scores = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
            other = torch.zeros_like(scores)
            return scores, other, other, other, other.bool()

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", DoubleHead)


@pytest.mark.parametrize(("head", "close"), [("own", 1e-4), ("double", 1e-9)])
@pytest.mark.parametrize("form", ["prompts", "chats"])
def test_loss_and_gradients_are_trls(
    trainer_of: Any,
    tiny_base: Path,
    build: Any,
    disturb: Any,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    head: str,
    close: float,
) -> None:
    if head == "double":
        double_head(monkeypatch)
    ours = build(SETTINGS)
    disturb(ours)
    outcome = imitation(Scorer.of(ours), our_batch(FORMS[form], tiny_base))
    outcome.loss.backward()
    trainer = trainer_of(FORMS[form])
    mine = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                parameter.data = mine[name].detach().clone()
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(list(trainer.train_dataset)))
    loss.backward()
    assert outcome.loss.item() == pytest.approx(loss.item(), rel=close)
    for name, value in trainer.model.named_parameters():
        if value.requires_grad:
            tolerance = close * value.grad.abs().max().item()
            torch.testing.assert_close(mine[name].grad, value.grad, rtol=10 * close, atol=tolerance)
