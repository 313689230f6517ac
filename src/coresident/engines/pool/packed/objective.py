"""What a step makes of its scores: each learner's own loss and figures, side by side and never summed over learners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from coresident.engines.pool.packed.rows import Rows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Objective:
    """`losses` [N], with a graph; `figures` by name, [N] each, detached."""

    losses: Tensor
    figures: dict[str, Tensor]


def by_sequence(rows: Rows, scores: Tensor) -> Tensor:
    """The scores [R] of scored tokens, summed by sequence: [S]."""
    cells = rows.sequences * rows.longest
    spread = scores.new_zeros(cells + rows.spare).index_copy(0, rows.cells, scores)
    return spread[:cells].view(rows.sequences, -1).sum(dim=1)


def preferences(rows: Rows, policy: Tensor, reference: Tensor, betas: Tensor) -> Objective:
    """DPO's loss (`learning.dpo`) for the log-probabilities [S] of N learners, whose `betas` are [N]."""
    ratios = _by_learner(rows, policy - reference)
    each = [betas[:, None]] if len(ratios) == 1 else list(betas)
    losses, chosen, rejected = [], [], []
    for ratio, beta in zip(ratios, each, strict=True):
        one, other = ratio.chunk(2, dim=-1)
        losses.append(-F.logsigmoid(beta * (one - other)))
        chosen.append(beta * one.detach())
        rejected.append(beta * other.detach())

    def means(values: Iterable[Tensor]) -> Tensor:
        return torch.stack([value.mean(-1) for value in values]).flatten()

    chosen_reward, rejected_reward = means(chosen), means(rejected)
    figures = {
        "chosen_reward": chosen_reward,
        "rejected_reward": rejected_reward,
        "margin": chosen_reward - rejected_reward,
        "accuracy": means((one > other).to(one.dtype) for one, other in zip(chosen, rejected, strict=True)),
    }
    return Objective(means(losses), figures)


def imitations(rows: Rows, policy: Tensor) -> Objective:
    """SFT's loss (`learning.sft`) for the log-probabilities [S]: the mean over each learner's scored tokens."""
    sums = torch.stack([part.sum(-1) for part in _by_learner(rows, policy)]).flatten()
    return Objective(-sums / rows.counts, {})


def _by_learner(rows: Rows, values: Tensor) -> Sequence[Tensor]:
    """[S] by learner: one [N, S / N] where all have equally many sequences, else one tensor each. Nothing meets another's."""
    if len(set(rows.sizes)) == 1:
        return [values.view(len(rows.sizes), -1)]
    return torch.split(values, list(rows.sizes))
