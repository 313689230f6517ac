"""The experts of every layer behind a cache: what a step needs is brought in, and each expert runs once over all its rows.

The plain path, for prefill on any device and for decoding on a CPU. Whatever the capacity, an expert sees the same rows in
one product, and a row's experts are added up in the router's order: so the arithmetic does not depend on what was resident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coresident.engines.moe.cache import Cache, Step
from coresident.engines.moe.layout.record import swiglu
from coresident.engines.moe.residency.clock import POLICY, WAIT, Clock
from coresident.engines.moe.residency.slots import Slots
from coresident.engines.moe.tiers.host import Host


@dataclass
class Experts:
    """A model's experts: which are resident (`cache`), where (`slots`), and where the others come from (`host`)."""

    cache: Cache
    slots: Slots
    host: Host
    dtype: torch.dtype
    clock: Clock

    def run(self, layer: int, x: Tensor, chosen: Tensor, weights: Tensor, prefill: bool) -> Tensor:
        """sum_k weights[n, k] * expert(chosen[n, k])(x[n]).

        x [N, H] in `dtype`, chosen [N, K] of int64, weights [N, K] of float32. Returns [N, H] in `dtype`.
        """
        with self.clock(WAIT):
            pairs = chosen.tolist()
        places: dict[int, list[int]] = {}
        for number, expert in enumerate(expert for row in pairs for expert in row):
            places.setdefault(expert, []).append(number)
        out = x.new_empty(chosen.numel(), x.shape[1], dtype=torch.float32)
        top_k = chosen.shape[1]
        ordered = sorted(places)
        where = torch.tensor([place for expert in ordered for place in places[expert]]).to(x.device)
        spans = _spans(ordered, places)
        for wave in self.bring(layer, ordered, prefill):
            for expert in wave:
                self.slots.wait_for(layer, (expert,))
                rows = where[spans[expert]]
                y = swiglu(x[rows // top_k], self.slots.expert(layer, expert, self.dtype))
                out[rows] = y.float()
                self.slots.read(layer, (expert,))
        scaled = out.view(*chosen.shape, -1) * weights[..., None]
        return scaled.sum(1).to(x.dtype)

    def bring(
        self, layer: int, experts: Sequence[int], prefill: bool, show: bool = False
    ) -> Iterator[list[int]]:
        """The waves in which these distinct experts can be resident; each is (or is on its way) when it is yielded.

        `show` is `Slots.fill`'s.
        """
        for wave, step in self._waves(layer, experts, prefill):
            if step.fills:
                self.slots.fill(layer, step.fills, self.host, show)
            yield wave

    def _waves(self, layer: int, experts: Sequence[int], prefill: bool) -> Iterator[tuple[list[int], Step]]:
        if not prefill and len(experts) <= self.cache.capacities[layer]:
            with self.clock(POLICY):
                step = self.cache.step(layer, experts)
            yield list(experts), step
            return
        yield from self.cache.prefill(layer, experts)

    def preload(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Make every complete layer resident, so that it never stalls."""
        for layer, capacity in enumerate(self.cache.capacities):
            if capacity == self.cache.experts:
                fills = self.cache.prefetch(layer, range(capacity))
                self.slots.fill(layer, fills, self.host)
                self.slots.wait_for(layer, [expert for expert, _ in fills])
            progress(layer)


def _spans(ordered: Sequence[int], places: dict[int, list[int]]) -> dict[int, slice]:
    found, at = {}, 0
    for expert in ordered:
        found[expert] = slice(at, at + len(places[expert]))
        at += len(places[expert])
    return found
