"""What an adapter does on data that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from coresident.engines.pool.learning.dpo import preference
from coresident.engines.pool.learning.scoring import Scorer
from coresident.engines.pool.learning.tokenized import Batch, Tokenized, collate
from coresident.engines.pool.parameters import DPO

if TYPE_CHECKING:
    from torch import Tensor


def in_batches(data: Tokenized, settings: DPO, device: torch.device) -> list[Batch]:
    """All of the data once, in order, on the device."""
    starts = range(0, len(data.pairs), settings.batch)
    parts = [data.pairs[start : start + settings.batch] for start in starts]
    return [collate(part, settings.max_length, data.padding).to(device) for part in parts]


@torch.no_grad()
def evaluate(
    scorer: Scorer, batches: Sequence[Batch], settings: DPO, known: Sequence[Tensor | None]
) -> dict[str, float]:
    """What the model makes of the batches, whose reference log-probabilities are `known` (None: the base's, now).

    Means over all pairs of `loss`, `chosen_reward`, `rejected_reward`, `margin` and `accuracy`; for SFT the
    `loss` a scored token. `tokens` are real tokens of all sequences, `scored` those that were predicted.
    """
    counts = {
        "tokens": float(sum(batch.tokens for batch in batches)),
        "scored": float(sum(len(batch.labels) for batch in batches)),
    }
    if settings.loss == "sft":
        total = torch.stack([scorer.score(batch).double().sum() for batch in batches]).sum()
        return {"loss": -total.item() / counts["scored"], **counts}
    sums: dict[str, list[Tensor]] = {}
    pairs = 0
    for batch, reference in zip(batches, known, strict=True):
        outcome = preference(scorer, batch, settings.beta, reference)
        size = len(outcome.margins)
        pairs += size
        for name, value in {"loss": outcome.loss, **outcome.figures}.items():
            sums.setdefault(name, []).append(value.double() * size)
    return {**{name: torch.stack(values).sum().item() / pairs for name, values in sums.items()}, **counts}
