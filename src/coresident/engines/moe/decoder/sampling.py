"""Which token comes next: the likeliest, or one drawn from a distribution that temperature, top-k and top-p cut."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from coresident.workload import Parameters


class Sampling(Parameters):
    """`temperature` 0 is greedy. `top_k` 0 keeps all tokens; `top_p` keeps the fewest that hold so much probability."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int = 0


class Sampler:
    """Draws on the CPU in float32, so that a seed gives the same text on every device."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """The next token of each row of scores [B, V]: [B] of int64 on the device of `logits`."""
        asked = self.sampling
        if asked.temperature == 0:
            return logits.argmax(-1)
        scores = logits.float().cpu() / asked.temperature
        if 0 < asked.top_k < scores.shape[-1]:
            least = scores.topk(asked.top_k).values[:, -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        if asked.top_p < 1:
            ordered, places = scores.softmax(-1).sort(-1, descending=True)
            # A token stays where what comes before it does not reach top_p.
            out = ordered.cumsum(-1) - ordered >= asked.top_p
            scores = scores.masked_fill(torch.zeros_like(out).scatter(-1, places, out), float("-inf"))
        drawn = torch.multinomial(scores.softmax(-1), 1, generator=self._generator)[:, 0]
        return drawn.to(logits.device)
