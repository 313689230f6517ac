"""What a generation gives a trace, whoever computes it, and how its tokens are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coresident.engines.moe.traces.manifest import Sampling
from coresident.errors import UserError


@dataclass(frozen=True)
class Routed:
    """What one prompt's generation chose: `tokens` int32 [T] that went through the model, `logits` float32 [T, L, N],
    `experts` int64 [T, L, k], the likeliest first, `ahead` int64 [T, depths, L, width].
    """

    tokens: NDArray[np.int32]
    logits: NDArray[np.float32]
    experts: NDArray[np.int64]
    ahead: NDArray[np.int64]


# Prompts of one length, a seed for each, and how to draw: what was chosen, one for each prompt.
Generate = Callable[[Sequence[Sequence[int]], Sequence[int], Sampling], "list[Routed]"]


def drawn(
    logits: Tensor, sources: Sequence[torch.Generator], temperature: float, never: Sequence[int]
) -> Tensor:
    """One token a row; the likeliest at temperature 0. Raises UserError for scores that are no numbers."""
    if not logits.amax(-1).isfinite().all():
        raise UserError(
            "the model scores a token as no finite number: its weights or its config.json are damaged",
            "copy the model again from its source",
        )
    if never:
        logits = logits.index_fill(1, torch.tensor(never), -torch.inf)
    if temperature == 0:
        return logits.argmax(-1)
    # From the highest down, as the decoder's sampler: almost no temperature overflows to where the probability is zero.
    chances = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    return torch.stack(
        [torch.multinomial(row, 1, generator=source)[0] for row, source in zip(chances, sources, strict=True)]
    )
