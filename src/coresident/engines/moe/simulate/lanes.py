"""The cache's state machine for many lanes at once: what `cache.Cache` does one expert at a time, in arrays.

Within a step a policy gives up several residents one after the other; since nothing changes their order meanwhile, they are the
several lowest at once. `play.plainly` is the oracle that this agrees with bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coresident.engines.moe import policies
from coresident.engines.moe.simulate.moments import Moments
from coresident.engines.moe.traces.masks import Bools
from coresident.errors import InternalError

Rule = Literal["lru", "lfu", "lfu-decay", "static", "belady"]


@dataclass(frozen=True)
class Played:
    """What every lane did at every moment, [M, lanes]: `hits`; what was fetched ahead (`issued`), and how much of it this
    very step used (`used`, bool [M, lanes, m], by its place in the order of issue). `first_uses` and `wasted` [lanes] count
    what was fetched ahead and used before it was evicted, and evicted unused or never used.
    """

    hits: NDArray[np.int64]
    issued: NDArray[np.int64]
    used: Bools
    first_uses: NDArray[np.int64]
    wasted: NDArray[np.int64]


def run(
    moments: Moments,
    rule: Rule,
    popularity: NDArray[np.float64] | None = None,
    half_life: float = policies.HALF_LIFE,
) -> Played:
    """Play all moments under `rule`; `popularity` [lanes, N] is static's."""
    count, lanes, experts = moments.chosen.shape
    width = moments.ahead.shape[-1]
    priority = np.zeros((lanes, experts))
    if rule == "static" and popularity is not None:
        priority = popularity.astype(np.float64)
    factor = policies.decay_factor(half_life)
    coming = _Coming(moments.chosen) if rule == "belady" else None
    clock = np.zeros(lanes)
    # A layer with room for all is brought in whole before the first token, as the decoder does it.
    resident = np.tile((moments.capacities == experts)[:, None], experts)
    unused = np.zeros_like(resident)
    hits = np.zeros((count, lanes), dtype=np.int64)
    issued = np.zeros_like(hits)
    used = np.zeros((count, lanes, width), dtype=np.bool_)
    first_uses, wasted = np.zeros(lanes, dtype=np.int64), np.zeros(lanes, dtype=np.int64)

    def fill(wanted: Bools, pinned: Bools) -> None:
        nonlocal resident, unused, wasted
        room = moments.capacities - resident.sum(axis=1)
        excess = np.maximum(0, wanted.sum(axis=1) - room)
        gone = _lowest(priority, resident & ~pinned, excess)
        wasted += (gone & unused).sum(axis=1)
        unused &= ~gone
        resident = (resident & ~gone) | wanted

    for moment in range(count):
        if width:
            ranked = moments.ahead[moment].astype(np.int64)
            ranked = np.where(np.arange(width) < moments.capacities[:, None], ranked, -1)
            pinned = _mask(ranked, experts)
            wanted = pinned & ~resident
            fetched = (ranked >= 0) & _at(wanted, ranked)
            fill(wanted, pinned)
            unused |= wanted
            issued[moment] = fetched.sum(axis=1)
        chosen = moments.chosen[moment]
        found = chosen & resident
        hits[moment] = found.sum(axis=1)
        if width:
            served = np.take_along_axis(
                fetched & _at(chosen, ranked), (~fetched).argsort(axis=1, kind="stable"), 1
            )
            used[moment] = served
            first_uses += (unused & chosen).sum(axis=1)
            unused &= ~chosen
        acts = chosen.any(axis=1)
        if rule == "lru":
            clock += acts
            priority = np.where(chosen, clock[:, None], priority)
        elif rule == "lfu":
            priority += chosen
        elif rule == "lfu-decay":
            priority = np.where(acts[:, None], priority * factor, priority) + chosen
        elif coming is not None:
            coming.touch(moment, priority)
        if not (found == chosen).all():
            fill(chosen & ~resident, chosen)
    wasted += unused.sum(axis=1)
    return Played(hits, issued, used, first_uses, wasted)


class _Coming:
    """For each choice, when its lane chooses that expert next: what Belady's rule looks at."""

    def __init__(self, chosen: Bools) -> None:
        lane, expert, moment = np.nonzero(chosen.transpose(1, 2, 0))
        following = np.append(moment[1:], 0).astype(np.float64)
        same = np.append((lane[1:] == lane[:-1]) & (expert[1:] == expert[:-1]), False)
        following[~same] = np.inf
        order = moment.argsort(kind="stable")
        self._lane, self._expert, self._following = lane[order], expert[order], following[order]
        self._edges = np.searchsorted(moment[order], np.arange(len(chosen) + 1))

    def touch(self, moment: int, priority: NDArray[np.float64]) -> None:
        part = slice(self._edges[moment], self._edges[moment + 1])
        priority[self._lane[part], self._expert[part]] = -self._following[part]


def _lowest(priority: NDArray[np.float64], candidates: Bools, count: NDArray[np.int64]) -> Bools:
    """The `count` [lanes] candidates of lowest priority, the lowest ids among equals, as bool [lanes, N]."""
    found = np.zeros_like(candidates)
    rows = np.flatnonzero(count)
    if not len(rows):
        return found
    if (candidates[rows].sum(axis=1) < count[rows]).any():
        raise InternalError("a step needs more slots than its lane has")
    # Those that are no candidates sort last, after a candidate that never comes again (-inf sorts first).
    order = np.lexsort((priority[rows], ~candidates[rows]), axis=1)
    takes = np.arange(candidates.shape[1]) < count[rows, None]
    picked = np.zeros((len(rows), candidates.shape[1]), dtype=np.bool_)
    np.put_along_axis(picked, order, takes, axis=1)
    found[rows] = picked
    return found


def _mask(ranked: NDArray[np.int64], experts: int) -> Bools:
    """[lanes, m] numbers, -1 for none, as bool [lanes, N]."""
    found = np.zeros((len(ranked), experts + 1), dtype=np.bool_)
    np.put_along_axis(found, ranked, True, axis=1)
    return found[:, :-1]


def _at(mask: Bools, ranked: NDArray[np.int64]) -> Bools:
    return np.asarray(np.take_along_axis(mask, np.maximum(ranked, 0), axis=1))


def popularity_of(counts: NDArray[Any], streams: int) -> NDArray[np.float64]:
    """Counts [L, N] for every stream's lanes."""
    return np.tile(counts.astype(np.float64), (streams, 1))
