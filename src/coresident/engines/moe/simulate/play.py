"""Traces through caches: what every decode step of every prompt hit, missed and fetched ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coresident.engines.moe import policies
from coresident.engines.moe.simulate import lanes
from coresident.engines.moe.simulate.lanes import Rule
from coresident.engines.moe.simulate.moments import Between, lay_out
from coresident.engines.moe.traces.masks import Bools
from coresident.engines.moe.traces.traces import Traces
from coresident.errors import UserError


@dataclass(frozen=True)
class Prompt:
    """One prompt's decode steps: `hits` and `misses` and what was fetched ahead, `issued`, int [steps, L]; `used` bool
    [steps, L, m]: which of those, in the order of issue, this very step needed.
    """

    hits: NDArray[np.int64]
    misses: NDArray[np.int64]
    issued: NDArray[np.int64]
    used: Bools


@dataclass(frozen=True)
class Playing:
    """All prompts, and of all that was fetched ahead: how much was used before it was evicted, and how much never was."""

    prompts: tuple[Prompt, ...]
    first_uses: int
    wasted: int


def play(
    traces: Traces,
    capacities: Sequence[int],
    rule: Rule,
    between: Between = "fresh",
    predicted: Sequence[NDArray[np.int16]] | None = None,
    popularity: NDArray[np.float32] | None = None,
    half_life: float = policies.HALF_LIFE,
) -> Playing:
    """Decode all prompts in caches of `capacities[layer]` slots. `predicted[prompt]` [steps, L, m] is fetched ahead;
    `popularity` [L, N] is what `static` keeps.
    """
    if rule == "belady" and predicted is not None:
        raise UserError(
            "policy belady is a bound without fetching ahead", "leave the predictor out, or choose lru"
        )
    if rule == "static" and popularity is None:
        raise UserError("policy static needs each expert's popularity", "give traces that hold fit prompts")
    moments = lay_out(traces, capacities, between, predicted)
    counts = None if popularity is None else lanes.popularity_of(popularity, len(moments.streams))
    played = lanes.run(moments, rule, counts, half_life)
    prompts: dict[int, Prompt] = {}
    for number, stream in enumerate(moments.streams):
        own = slice(number * moments.layers, (number + 1) * moments.layers)
        for place in dict.fromkeys(stream.prompt.tolist()):
            rows = np.flatnonzero((stream.prompt == place) & (stream.step >= 0))
            hits = played.hits[rows, own]
            prompts[place] = Prompt(
                hits, traces.model.top_k - hits, played.issued[rows, own], played.used[rows, own]
            )
    return Playing(
        tuple(prompts[place] for place in sorted(prompts)),
        int(played.first_uses.sum()),
        int(played.wasted.sum()),
    )
