"""The simulation as it is meant: traces through the very cache that the decoder asks, one expert at a time.

Slow and short; `lanes` is the same in arrays, and the tests hold the two together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coresident.engines.moe.cache import Cache
from coresident.engines.moe.policies import Policy
from coresident.engines.moe.simulate.moments import Between
from coresident.engines.moe.traces.traces import Trace, Traces


class Belady:
    """Gives up what is needed again last (Belady, 1966), from `future[layer]`, the sets that each layer will be asked for.

    Its semantics here: each layer by itself; a step's experts are asked for together, all must be resident at once, and
    none is served past the cache; so this is the fewest fills that any rule can have without fetching ahead. It does not
    make the fewest steps stall. The lowest id among those that are equally far.
    """

    def __init__(self, future: Sequence[Sequence[Collection[int]]]) -> None:
        self._future = future
        self._now = [-1] * len(future)

    def touch(self, layer: int, experts: Sequence[int]) -> None:  # noqa: ARG002 - the future knows them
        self._now[layer] += 1

    def victim(self, layer: int, resident: Collection[int], pinned: Collection[int]) -> int:
        coming = self._future[layer][self._now[layer] + 1 :]

        def wait(expert: int) -> float:
            return next((distance for distance, step in enumerate(coming) if expert in step), math.inf)

        return min((one for one in resident if one not in pinned), key=lambda one: (-wait(one), one))


def play(
    traces: Traces,
    capacities: Sequence[int],
    policy: Callable[[Sequence[int]], Policy],
    between: Between,
    predicted: Sequence[NDArray[np.int16]] | None = None,
) -> tuple[list[NDArray[np.int64]], list[Cache]]:
    """Each prompt's hits int [steps, L], and the caches with what they counted: one, or one a prompt (`fresh`).

    `policy` makes the policy of a cache that will see the prompts at these places of the set.
    """
    places = range(len(traces.prompts))
    groups = [list(places)] if between == "kept" else [[place] for place in places]
    hits, caches = [], []
    for group in groups:
        cache = Cache(policy(group), tuple(capacities), traces.model.experts)
        for layer, capacity in enumerate(capacities):
            if capacity == traces.model.experts:
                # Brought in whole before the first token, as the decoder does it.
                cache.resident[layer].update(range(capacity))
        for place in group:
            hits.append(
                _prompt(cache, traces.prompts[place], None if predicted is None else predicted[place])
            )
        caches.append(cache)
    return hits, caches


def _prompt(cache: Cache, one: Trace, predicted: NDArray[Any] | None) -> NDArray[np.int64]:
    layers = range(one.experts.shape[1])
    for layer in layers:
        for _ in cache.prefill(layer, np.unique(one.experts[: one.prefill, layer]).tolist()):
            pass
    hits = np.zeros((one.steps, len(layers)), dtype=np.int64)
    for step in range(one.steps):
        for layer in layers:
            if predicted is not None:
                cache.prefetch(layer, [expert for expert in predicted[step, layer].tolist() if expert >= 0])
            hits[step, layer] = cache.step(layer, one.decoded[step, layer].tolist()).hits
    return hits


def asked(traces: Traces, capacities: Sequence[int], places: Sequence[int]) -> list[list[set[int]]]:
    """The sets that each layer of a cache is asked for, in order, while it sees these prompts."""
    future: list[list[set[int]]] = [[] for _ in capacities]
    for layer, capacity in enumerate(capacities):
        for place in places:
            one = traces.prompts[place]
            needed = np.unique(one.experts[: one.prefill, layer]).tolist()
            future[layer] += [set(needed[at : at + capacity]) for at in range(0, len(needed), capacity)]
            future[layer] += [set(step) for step in one.decoded[:, layer].tolist()]
    return future
