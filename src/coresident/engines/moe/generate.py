"""Texts from prompts: prefill, then a token at a time until a stop token, a stop text, or enough."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coresident.engines.moe.decoder.decoder import Decoder
from coresident.engines.moe.decoder.sampling import Sampler, Sampling
from coresident.errors import UserError

# A row and its next token. True ends the row's text.
Emit = Callable[[int, int], bool]


@dataclass
class Generated:
    """`tokens[row]` without the prompt; the stop token is the last where one ended the text. Decode steps took `step_seconds`
    each, for `step_rows` texts; all together they asked for an expert `accesses` times, `hits` of which were resident.
    """

    tokens: list[list[int]]
    prefill_seconds: float
    step_seconds: list[float] = field(default_factory=list)
    step_rows: list[int] = field(default_factory=list)
    accesses: int = 0
    hits: int = 0


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    limit: int,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    ends: Collection[int] = (),
    emit: Emit = lambda *_: False,
) -> Generated:
    """At most `limit` tokens after each prompt. A row that is over leaves, so that it costs and changes nothing.

    Raises UserError for scores that are no numbers.
    """
    sampler, rows = Sampler(sampling, len(prompts)), list(range(len(prompts)))
    start = time.perf_counter()
    following = sampler(_finite(decoder.prefill(prompts)), rows)
    chosen = following.tolist()
    found = Generated([[] for _ in prompts], time.perf_counter() - start)
    decoder.settle()
    accesses, hits = decoder.experts.cache.counted()
    for produced in range(limit):
        if produced:
            start = time.perf_counter()
            following = sampler(_finite(decoder.step(following)), rows)
            chosen = following.tolist()
            found.step_seconds.append(time.perf_counter() - start)
            found.step_rows.append(len(rows))
        staying = []
        for place, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            found.tokens[row].append(token)
            if not emit(row, token) and token not in ends:
                staying.append(place)
        if not staying:
            break
        if len(staying) < len(rows):
            decoder.keep(staying)
            following = following[torch.tensor(staying, device=following.device)]
            rows = [rows[place] for place in staying]
    decoder.settle()
    every = decoder.experts.cache.counted()
    found.accesses, found.hits = every[0] - accesses, every[1] - hits
    return found


def _finite(logits: Tensor) -> Tensor:
    """Refuse scores of which the likeliest is no number: any text could be read out of them."""
    if not logits.amax(-1).isfinite().all():
        raise UserError(
            "the model scores a token as no finite number: its weights or its config.json are damaged, or its dtype overflows",
            "copy the model again from its source, or compute in float32 (--set dtype=float32)",
        )
    return logits
