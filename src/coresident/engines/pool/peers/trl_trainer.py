"""TRL's DPOTrainer with the few hooks that a measurement needs. Imports trl: for a learner's own process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer

from coresident.engines.pool.job import Job
from coresident.engines.pool.learning import data
from coresident.engines.pool.learning.learner import warmup
from coresident.engines.pool.learning.model import draw_adapter
from coresident.engines.pool.learning.tokenized import TokenPair, drawn, planned
from coresident.engines.pool.parameters import DPO

# What TRL calls the figures that a pool learner has as series.
FIGURES = {
    "chosen_reward": "rewards/chosen",
    "rejected_reward": "rewards/rejected",
    "margin": "rewards/margins",
    "accuracy": "rewards/accuracies",
}


class Peer(DPOTrainer):  # type: ignore[misc]
    """DPOTrainer that takes its samples in the given order, and lets itself be watched.

    `began` and `ended` are monotonic seconds around the steps after the first; `seconds` each step's own.
    `at_barrier` is called after the first step, `at_step` after each of the others.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.at_barrier: Callable[[], None] = lambda: None
        self.at_step: Callable[[int], None] = lambda _: None
        self.began = self.ended = 0.0
        self.seconds: list[float] = []
        self._losses: list[torch.Tensor] = []
        self._tokens: list[torch.Tensor] = []
        self._figures: dict[str, list[float]] = {}
        super().__init__(*arguments, **named)
        self.add_callback(_Watch(self))

    def series(self) -> dict[str, list[float]]:
        """What each step had, as far as it came: loss, TRL's figures, real tokens."""
        steps = len(self._losses)
        told = {"loss": [float(loss) for loss in self._losses]}
        for ours, theirs in FIGURES.items():
            told[ours] = [float(value) for value in self._figures.get(theirs, [])[:steps]]
        return told | {"tokens": [float(count) for count in self._tokens]}

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        """TRL's, of which the result is kept; nothing is waited for."""
        found = super().compute_loss(model, inputs, *arguments, **named)
        loss = found[0] if isinstance(found, tuple) else found
        self._losses.append(loss.detach())
        self._tokens.append(inputs["attention_mask"].sum())
        return found

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL averages its figures over steps when it logs, which is once, at the end: take them first."""
        for name, values in self._metrics["train"].items():
            self._figures.setdefault(name, []).extend(values)
        super().log(logs, start_time)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The other arms' schedule: transformers' starts with a step that trains nothing."""
        del num_training_steps
        steps = int(self.args.warmup_steps)
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda done: warmup(done + 1, steps))
        return self.lr_scheduler

    def _get_train_sampler(self, *_: Any, **__: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        # Already token ids: those that TRL would make of the same pairs, as the tests of both hold.
        return dataset


class _Watch(TrainerCallback):  # type: ignore[misc]
    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.monotonic()

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        peer, step = self._peer, int(state.global_step)
        if step in (1, args.max_steps) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        peer.ended = time.monotonic()
        peer.seconds.append(peer.ended - self._start)
        if step == 1:
            peer.at_barrier()
            peer.began = time.monotonic()
        else:
            peer.at_step(step)


def trainer(job: Job, number: int, tokenizer: Any) -> Peer:
    """TRL's trainer for learner `number`: base loaded, adapter added, samples in the order of every other arm."""
    from datasets import Dataset
    from peft import LoraConfig

    settings = job.parameters.of(number)
    shard = data.tokens(settings, number, tokenizer)
    rows = [
        {
            "prompt_ids": list(pair.prompt),
            "chosen_ids": list(pair.chosen),
            "rejected_ids": list(pair.rejected),
        }
        for batch in drawn(shard, settings, number)
        for pair in batch
        if isinstance(pair, TokenPair)
    ]
    peer = Peer(
        model=str(job.base),
        args=_arguments(settings, planned(shard, settings), Path(job.work) / f"trl-{number}", job.on_card),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            task_type="CAUSAL_LM",
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=list(settings.targets),
            lora_dropout=0.0,
            bias="none",
        ),
    )
    # TRL trains adapters over a 4-bit base in bfloat16: the values are ours, the type stays its own.
    types = {name: value.dtype for name, value in peer.model.named_parameters() if value.requires_grad}
    draw_adapter(peer.model, settings, torch.device("cuda", 0) if job.on_card else torch.device("cpu"))
    for name, value in peer.model.named_parameters():
        if name in types:
            value.data = value.data.to(types[name])
    return peer


def _arguments(settings: DPO, steps: int, out: Path, on_card: bool) -> Any:
    return DPOConfig(
        output_dir=str(out),
        beta=settings.beta,
        max_length=settings.max_length,
        precompute_ref_log_probs=settings.reference == "precomputed",
        per_device_train_batch_size=settings.batch,
        max_steps=steps,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.clip,
        gradient_checkpointing=settings.checkpointing,
        seed=settings.seed,
        model_init_kwargs={"dtype": settings.dtype, "device_map": {"": 0 if on_card else "cpu"}},
        use_cpu=not on_card,
        # Adapters stay float32; with autocast, TRL's default, their products are in the base's dtype.
        bf16=settings.adapter_products == "bfloat16",
        optim="adamw_bnb_8bit" if settings.optimizer == "adamw8bit" else "adamw_torch_fused",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
