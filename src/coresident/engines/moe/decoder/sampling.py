"""Which token comes next: the likeliest, or one drawn from a distribution that temperature, top-k and top-p cut."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Draws on the CPU in float32, so that a seed gives the same text on every device.

    Text n of a batch draws as `seed` + n alone would: what it says does not depend on who is decoded with it, or still is.
    """

    def __init__(self, sampling: Sampling, texts: int = 1) -> None:
        self.sampling = sampling
        self._sources = [torch.Generator().manual_seed(sampling.seed + text) for text in range(texts)]

    def __call__(self, logits: Tensor, texts: Sequence[int] = (0,)) -> Tensor:
        """The next token of each of `texts` by its row of scores [B, V]: [B] of int64 on the device of `logits`."""
        asked = self.sampling
        if asked.temperature == 0:
            return logits.argmax(-1)
        # From the highest down: what is divided by almost nothing overflows to where its probability is zero.
        whole = logits.float().cpu()
        scores = (whole - whole.amax(-1, keepdim=True)) / asked.temperature
        if 0 < asked.top_k < scores.shape[-1]:
            least = scores.topk(asked.top_k).values[:, -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        if asked.top_p < 1:
            ordered, places = scores.softmax(-1).sort(-1, descending=True)
            # A token stays where what comes before it does not reach top_p.
            out = ordered.cumsum(-1) - ordered >= asked.top_p
            scores = scores.masked_fill(torch.zeros_like(out).scatter(-1, places, out), float("-inf"))
        drawn = [
            torch.multinomial(row, 1, generator=self._sources[text])
            for text, row in zip(texts, scores.softmax(-1), strict=True)
        ]
        return torch.cat(drawn).to(logits.device)
