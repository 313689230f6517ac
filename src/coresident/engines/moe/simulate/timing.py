"""When fetches arrive: one link, first come first served, beside one device that computes layer after layer.

A layer's choice is known when the layer before is done and has reached the host. What it misses is queued at once, and then
what is predicted for the layer `depth` ahead. The layer waits for what it needs and lacks; it computes its share of T_resident.
Nothing queued is taken back. Without predictions this is the serial bound exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coresident.engines.moe.simulate.bounds import Cost
from coresident.engines.moe.simulate.play import Prompt


@dataclass(frozen=True)
class Timed:
    """Of all prompts: `seconds` of decoding, `late` fetches ahead that their step had to wait for, and the `stalled`
    layer-steps that waited at all.
    """

    seconds: float
    late: int
    stalled: int


def timed(prompts: Sequence[Prompt], cost: Cost, depth: int) -> Timed:
    """Every prompt by itself, from an idle link."""
    layers = prompts[0].misses.shape[1]
    steps = max(len(one.misses) for one in prompts)
    misses = _flat([one.misses for one in prompts], steps)
    issued = _flat([one.issued for one in prompts], steps)
    used = _flat([one.used for one in prompts], steps)
    lives = _flat([np.ones_like(one.misses, dtype=np.bool_) for one in prompts], steps)
    width, moments = used.shape[-1], misses.shape[1]
    order = np.arange(1, width + 1) * cost.fetch
    now, free = np.zeros(len(prompts)), np.zeros(len(prompts))
    arrives = np.zeros((layers, len(prompts), width))
    late = stalled = 0

    def issue(moment: int, when: NDArray[np.float64]) -> None:
        nonlocal free
        if width and moment < moments:
            start = np.maximum(when, free)
            arrives[moment % layers] = start[:, None] + order
            free = np.where(issued[:, moment] > 0, start + issued[:, moment] * cost.fetch, free)

    for moment in range(min(depth, moments)):
        issue(moment, now)
    for moment in range(moments):
        known = now + cost.sync_seconds * lives[:, moment]
        waits = known
        if width:
            needed = np.where(used[:, moment], arrives[moment % layers], 0)
            late += int((needed > known[:, None]).sum())
            waits = np.maximum(known, needed.max(axis=1))
        missed = misses[:, moment]
        free = np.where(missed > 0, np.maximum(known, free) + missed * cost.fetch, free)
        waits = np.where(missed > 0, np.maximum(waits, free), waits)
        stalled += int((waits > known).sum())
        issue(moment + depth, known)
        now = waits + cost.resident_seconds / layers * lives[:, moment]
    return Timed(float(now.sum()), late, stalled)


def _flat(arrays: Sequence[NDArray[Any]], steps: int) -> NDArray[Any]:
    """[prompts, steps x layers, ...], padded by nothing to do."""
    found = np.zeros((len(arrays), steps, *arrays[0].shape[1:]), arrays[0].dtype)
    for place, array in enumerate(arrays):
        found[place, : len(array)] = array
    return found.reshape(len(arrays), steps * arrays[0].shape[1], *arrays[0].shape[2:])
