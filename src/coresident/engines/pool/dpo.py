"""The loss of direct preference optimisation, alone: what it computes must be readable in one place.

Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", 2023,
equation 7: -log sigmoid(beta ((log pi(y+) - log ref(y+)) - (log pi(y-) - log ref(y-)))), where the
log-probability of a completion is the sum over its tokens. The reference is the frozen base itself: the same
model with its adapters off.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from coresident.engines.pool.tokenized import Batch

if TYPE_CHECKING:
    from torch import Tensor, nn

_IGNORED = -100


@dataclass(frozen=True)
class Preference:
    """What one batch of B pairs says: `loss` (a scalar with a graph), and per pair, detached, the two
    rewards, shape [B].
    """

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor

    @property
    def margins(self) -> Tensor:
        """Chosen less rejected reward, shape [B]."""
        return self.chosen_rewards - self.rejected_rewards

    @property
    def accuracy(self) -> float:
        """The share of pairs whose chosen reward is strictly the greater one, so a policy equal to its
        reference has 0.
        """
        return (self.chosen_rewards > self.rejected_rewards).double().mean().item()


def log_probabilities(model: nn.Module, batch: Batch) -> Tensor:
    """The summed log-probability of each sequence's completion, shape [2B], in float32 (float64 for a float64
    model).

    Position t predicts token t + 1, so labels and completion mask are shifted by one. Logits are only asked
    for from the position before the first completion token on: a prompt's logits, as large as the vocabulary,
    are never made.
    """
    mask = batch.completion_mask[:, 1:].bool()
    labels = batch.input_ids[:, 1:].masked_fill(~mask, _IGNORED)
    first = int(mask.any(dim=0).int().argmax())
    positions = torch.arange(first, mask.shape[1], device=mask.device)
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "use_cache": False,
    }
    if _keeps_logits(model):
        logits = model(**inputs, logits_to_keep=positions).logits
    else:
        logits = model(**inputs).logits[:, positions]
    if logits.dtype != torch.float64:
        logits = logits.float()
    labels = labels[:, first:]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED, reduction="none")
    return -losses.view_as(labels).sum(dim=1)


def preference(model: nn.Module, batch: Batch, beta: float) -> Preference:
    """The DPO loss of the batch, averaged over its pairs, with both rewards beta (log pi - log ref).

    `model` is a PEFT model whose one adapter is the policy. A zero adapter gives exactly ln 2, zero rewards,
    accuracy 0.
    """
    # The reference goes first: its activations are gone before the policy's are kept for the backward pass.
    with adapters_off(model), torch.no_grad():
        reference = log_probabilities(model, batch)
    ratios = log_probabilities(model, batch) - reference
    chosen, rejected = ratios.chunk(2)
    loss = -F.logsigmoid(beta * (chosen - rejected)).mean()
    return Preference(loss, beta * chosen.detach(), beta * rejected.detach())


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The base alone. On leaving, exactly those parameters require grad that did before.

    PEFT's own context re-enables the adapter by marking all of it trainable, whatever was frozen on purpose.
    """
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with model.disable_adapter():  # type: ignore[operator]
            yield
    finally:
        for parameter, trainable in before:
            parameter.requires_grad_(trainable)


def _keeps_logits(model: nn.Module) -> bool:
    base = model.get_base_model()  # type: ignore[operator]
    return "logits_to_keep" in inspect.signature(base.forward).parameters
