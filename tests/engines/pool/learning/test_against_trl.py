"""TRL is the peer: on one batch, in float64, tokens, loss, gradients and logged rewards are its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pool.learning.dpo import preference
from coresident.engines.pool.learning.scoring import Scorer
from coresident.engines.pool.learning.tokenized import collate, tokenize
from coresident.engines.pool.packed.arena import Arena, draw
from coresident.engines.pool.packed.optimiser import rates
from coresident.engines.pool.packed.policy import Policy
from coresident.engines.pool.packed.rows import pack
from coresident.engines.pool.packed.step import Step
from coresident.engines.pool.packed.written import Written
from coresident.engines.pool.parameters import DPO
from coresident.text import arithmetic, pythondocs, tokenizer
from coresident.text.preferences import Pair

SETTINGS = DPO(dtype="float64", batch=3, max_length=64, beta=0.2, rank=4, alpha=8.0)
CHATS = [
    Pair(
        ({"role": "system", "content": "Be brief."}, {"role": "user", "content": f"What is {n} + 1?"}),
        ({"role": "assistant", "content": f"It is {n + 1}."},),
        ({"role": "assistant", "content": "I will not say."},),
    )
    for n in range(4)
]
TEXTS = pythondocs.pairs(4, 100, SETTINGS.max_length) + arithmetic.pairs(4, 100)
# A prompt that ends inside a token: where prompt and completion merge, the boundary moves to the left.
MERGING = [Pair("This is the sta", "tement meant.", "te of it.")]


@pytest.fixture(scope="module")
def trainer_of(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a DPOTrainer over the tiny base in float64, for given pairs."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    def made(pairs: list[Pair]) -> Any:
        rows = [
            {
                field: value if isinstance(value := getattr(pair, field), str) else list(value)
                for field in vars(pair)
            }
            for pair in pairs
        ]
        arguments = DPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            beta=SETTINGS.beta,
            max_length=SETTINGS.max_length,
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            remove_unused_columns=False,
        )
        return DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float64),
            args=arguments,
            train_dataset=Dataset.from_list(rows).remove_columns("origin"),
            processing_class=tokenizer.load(tiny_base),
            peft_config=LoraConfig(
                task_type="CAUSAL_LM",
                r=SETTINGS.rank,
                lora_alpha=SETTINGS.alpha,
                target_modules=list(SETTINGS.targets),
            ),
        )

    return made


@pytest.mark.parametrize("pairs", [TEXTS, CHATS, MERGING], ids=["text", "chat", "merging"])
def test_tokens_masks_and_truncation_are_trls(trainer_of: Any, tiny_base: Path, pairs: list[Pair]) -> None:
    trainer = trainer_of(pairs)
    theirs = trainer.data_collator(list(trainer.train_dataset))
    tokenized = tokenize(pairs, tokenizer.load(tiny_base), SETTINGS)
    ours = collate(tokenized.pairs, SETTINGS.max_length, tokenized.padding)
    assert torch.equal(ours.input_ids, theirs["input_ids"])
    assert torch.equal(ours.attention_mask, theirs["attention_mask"])
    assert torch.equal(ours.completion_mask, theirs["completion_mask"])
    assert ours.tokens == theirs["attention_mask"].sum().item()


def test_the_cases_above_are_the_ones_meant(tiny_base: Path) -> None:
    texts = tokenize(TEXTS, tokenizer.load(tiny_base), SETTINGS)
    assert any(len(pair.prompt + pair.chosen) > SETTINGS.max_length for pair in texts.pairs)
    alone = tokenizer.load(tiny_base)(MERGING[0].prompt)["input_ids"]
    assert len(tokenize(MERGING, tokenizer.load(tiny_base), SETTINGS).pairs[0].prompt) < len(alone)


class DoubleHead:
    """TRL scores the head in float32 whatever the model's dtype; this scores it in the model's, and nothing
    else changes.
    """

    @staticmethod
    def apply(hidden: Any, weight: Any, bias: Any, labels: Any, *rest: Any) -> tuple[Any, ...]:
        logits = torch.nn.functional.linear(hidden, weight, bias)
        scores = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
        other = torch.zeros_like(scores)
        return scores, other, other, other, other.bool()


BATCHES = pytest.mark.parametrize("pairs", [TEXTS, CHATS, MERGING], ids=["text", "chat", "merging"])


@BATCHES
@pytest.mark.parametrize(("head", "close"), [("own", 1e-4), ("double", 1e-9)])
def test_loss_gradients_and_rewards_are_trls(
    trainer_of: Any,
    tiny_base: Path,
    build: Any,
    disturb: Any,
    monkeypatch: pytest.MonkeyPatch,
    head: str,
    close: float,
    pairs: list[Pair],
) -> None:
    if head == "double":
        monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", DoubleHead)
    tokenized = tokenize(pairs, tokenizer.load(tiny_base), SETTINGS)
    ours = build(SETTINGS)
    disturb(ours)
    outcome = preference(
        Scorer.of(ours), collate(tokenized.pairs, SETTINGS.max_length, tokenized.padding), SETTINGS.beta
    )
    outcome.loss.backward()
    mine = {name: value for name, value in ours.named_parameters() if value.requires_grad}
    gradients = {name: value.grad for name, value in mine.items()}
    figures = {
        "chosen": outcome.chosen_rewards.mean().item(),
        "rejected": outcome.rejected_rewards.mean().item(),
        "margins": outcome.margins.mean().item(),
        "accuracies": outcome.accuracy.item(),
    }
    compared(trainer_of(pairs), mine, outcome.loss.item(), gradients, figures, close)


@BATCHES
@pytest.mark.parametrize("kind", [Step, Written])
def test_a_packed_learners_loss_gradients_and_rewards_are_trls(
    trainer_of: Any,
    tiny_base: Path,
    build: Any,
    disturb: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Step],
    pairs: list[Pair],
) -> None:
    """The second of three learners, whose neighbours have other adapters, ranks and data."""
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", DoubleHead)
    words = tokenizer.load(tiny_base)
    collated = []
    for own in (TEXTS[::-1], pairs, CHATS):
        tokenized = tokenize(own, words, SETTINGS)
        collated.append(collate(tokenized.pairs, SETTINGS.max_length, tokenized.padding))
    rows = pack(collated)
    policy = Policy(build(SETTINGS))
    source = build(SETTINGS)
    disturb(source)
    mine = {name: value for name, value in source.named_parameters() if value.requires_grad}
    arena = Arena(policy.layers, [8, 4, 2], torch.float64, torch.float64, torch.device("cpu"))
    for row, rank in ((0, 8), (2, 2)):
        drawn = draw(policy.layers, rank, row)
        arena.put(row, {name: torch.randn_like(value) / 4 for name, value in drawn.items()})
    arena.put(1, {name.replace(".default.", "."): value for name, value in mine.items()})
    settings = [SETTINGS.model_copy(update={"rank": rank}) for rank in (8, 4, 2)]
    step = kind(policy, arena, settings, torch.zeros(3, dtype=torch.bool))
    table = step(rows, None, rates(settings, [1, 1, 1], torch.float64))
    told = dict(zip(step.names, table[:, 1].tolist(), strict=False))
    written = dict(arena.parts(1, arena.grads))
    gradients = {name: written[name.replace(".default.", ".")] for name in mine}
    figures = {
        "chosen": told["chosen_reward"],
        "rejected": told["rejected_reward"],
        "margins": told["margin"],
        "accuracies": told["accuracy"],
    }
    # What is written out computes a norm's gradient in float32, as transformers' norms are.
    compared(trainer_of(pairs), mine, told["loss"], gradients, figures, 1e-9 if kind is Step else 1e-5)


def compared(
    trainer: Any, mine: dict[str, Any], loss: float, gradients: Any, figures: dict[str, float], close: float
) -> None:
    """All of ours against what TRL makes of the same batch with the same adapter."""
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                parameter.data = mine[name].detach().clone()
    their_loss = trainer.compute_loss(trainer.model, trainer.data_collator(list(trainer.train_dataset)))
    their_loss.backward()
    assert abs(their_loss.item() - 0.6931) > 1e-3, "a batch that tells policy from reference"
    assert loss == pytest.approx(their_loss.item(), rel=close)
    theirs = {name: value.grad for name, value in trainer.model.named_parameters() if value.requires_grad}
    assert theirs.keys() == gradients.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(
            gradients[name], gradient, rtol=10 * close, atol=close * gradient.abs().max().item()
        )
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    for name, value in figures.items():
        assert value == pytest.approx(logged[f"rewards/{name}"], rel=close), name
