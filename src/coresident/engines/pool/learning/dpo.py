"""The loss of direct preference optimisation, alone: what it computes must be readable in one place.

Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", 2023,
equation 7: -log sigmoid(beta ((log pi(y+) - log ref(y+)) - (log pi(y-) - log ref(y-)))), where the
log-probability of a completion is the sum over its tokens. The reference is the frozen base itself (the same
model with its adapters off), or was worked out before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from coresident.engines.pool.learning.scoring import Scorer, log_probabilities
from coresident.engines.pool.learning.tokenized import Batch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Preference:
    """What one batch of B pairs says: `loss` (a scalar with a graph), and per pair, detached, the two
    rewards, shape [B]. Nothing here waits for the device.
    """

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor

    @property
    def margins(self) -> Tensor:
        """Chosen less rejected reward, shape [B]."""
        return self.chosen_rewards - self.rejected_rewards

    @property
    def accuracy(self) -> Tensor:
        """The share of pairs whose chosen reward is strictly the greater one, so a policy equal to its
        reference has 0. A scalar.
        """
        return (self.chosen_rewards > self.rejected_rewards).double().mean()

    @property
    def figures(self) -> dict[str, Tensor]:
        """What a step reports beside its loss: scalars, by name."""
        return {
            "chosen_reward": self.chosen_rewards.mean(),
            "rejected_reward": self.rejected_rewards.mean(),
            "margin": self.margins.mean(),
            "accuracy": self.accuracy,
        }


def reference_log_probabilities(scorer: Scorer, batch: Batch) -> Tensor:
    """The frozen base's own, shape [2B], without a graph."""
    with scorer.adapters_off(), torch.no_grad():
        return log_probabilities(scorer, batch)


def preference(scorer: Scorer, batch: Batch, beta: float, reference: Tensor | None = None) -> Preference:
    """The DPO loss of the batch, averaged over its pairs, with both rewards beta (log pi - log ref).

    The model's one adapter is the policy; `reference` [2B] are log-probabilities worked out before (None: the
    base's, now). A zero adapter gives exactly ln 2, zero rewards, accuracy 0.
    """
    if reference is None:
        # First: its activations are gone before the policy's are kept for the backward pass.
        reference = reference_log_probabilities(scorer, batch)
    ratios = log_probabilities(scorer, batch) - reference
    chosen, rejected = ratios.chunk(2)
    loss = -F.logsigmoid(beta * (chosen - rejected)).mean()
    return Preference(loss, beta * chosen.detach(), beta * rejected.detach())
