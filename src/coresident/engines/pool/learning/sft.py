"""The loss of supervised fine-tuning, alone: the mean over a batch's scored tokens of their negative
log-probability, as TRL's SFTTrainer has it by default (each token counts once, whichever row it is in).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coresident.engines.pool.learning.scoring import Scorer
from coresident.engines.pool.learning.tokenized import Batch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Imitation:
    """What one batch of examples says: `loss`, a scalar with a graph."""

    loss: Tensor

    @property
    def figures(self) -> dict[str, Tensor]:
        """What a step reports beside its loss: nothing."""
        return {}


def imitation(scorer: Scorer, batch: Batch) -> Imitation:
    """The loss of the batch in nats a token."""
    return Imitation(-scorer.score(batch).mean())
