"""A written-out step as one CUDA graph: launched once instead of some four thousand times.

A graph replays one shape over the same memory. So rows are rounded up to few shapes (`rows.padded`), what changes from step
to step is copied to where the graph reads it, and there is one graph for each shape met, up to `MOST`; shapes beyond are
run as they come. All graphs share one pool of memory, since they run one after another: what one leaves there, the next may
write over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from coresident.engines.pool.packed.arena import Arena
from coresident.engines.pool.packed.extent import Extent, rounded_up
from coresident.engines.pool.packed.policy import Current, Policy
from coresident.engines.pool.packed.rows import Rows, padded
from coresident.engines.pool.packed.written import Written
from coresident.engines.pool.parameters import DPO

if TYPE_CHECKING:
    from torch import Tensor

MOST = 16
# Steps before the capture: for what compiles, tunes or allocates at its first call.
_WARM = 2


@dataclass
class Recorded:
    """One shape's graph, what it reads, and what it gives.

    A graph knows addresses and holds nothing: all that it reads has to be held here, or be there as long as the step is.
    """

    graph: torch.cuda.CUDAGraph
    current: Current | None
    rows: Rows
    reference: Tensor | None
    rates: Tensor
    table: Tensor


class Captured(Written):
    """A written-out step for a CUDA device, captured."""

    def __init__(
        self, policy: Policy, arena: Arena, settings: Sequence[DPO], alive: Tensor, compile: bool = True
    ) -> None:
        super().__init__(policy, arena, settings, alive, compile)
        self._recorded: dict[object, Recorded] = {}
        self._pool = torch.cuda.MemPool()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def shaped(self, rows: Rows, most: Extent | None) -> Rows:
        """The rows in one of few shapes."""
        return rounded(rows, most)

    def __call__(self, rows: Rows, reference: Tensor | None, rates: Tensor) -> Tensor:
        """As the plain step's."""
        key = (rows.shape, reference is None)
        if key not in self._recorded:
            if len(self._recorded) >= MOST:
                return super().__call__(rows, reference, rates)
            self._recorded[key] = self._record(rows, reference, rates)
        one = self._recorded[key]
        for name, value in rows.tensors.items():
            getattr(one.rows, name).copy_(value)
        if reference is not None and one.reference is not None:
            one.reference.copy_(reference)
        one.rates.copy_(rates)
        one.graph.replay()
        return one.table

    def _record(self, rows: Rows, reference: Tensor | None, rates: Tensor) -> Recorded:
        rows = rows.copied()
        reference = None if reference is None else reference.clone()
        rates = rates.clone()
        # Nobody alive: nothing that is computed meanwhile is applied.
        alive = self.alive.clone()
        self.alive.zero_()
        # What the graph reads is made here, outside of the graphs' memory: inside, an earlier graph's replay writes over it.
        self.at(rows)
        # Graphs of learners that have left are of no more use.
        torch.cuda.empty_cache()
        self._stream.wait_stream(torch.cuda.current_stream())
        # Warmed up in the graphs' own memory and stream: what that takes is what the graph takes afterwards.
        with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._pool):
            for _ in range(_WARM):
                super().__call__(rows, reference, rates)
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool.id, stream=self._stream):  # type: ignore[arg-type]
            table = super().__call__(rows, reference, rates)
        self.alive.copy_(alive)
        return Recorded(graph, self.policy.current, rows, reference, rates, table)


def rounded(rows: Rows, most: Extent | None = None) -> Rows:
    """The rows (on the host) in one of few shapes (`extent.rounded_up`); `most` is the largest of all steps'."""
    return padded(rows, rounded_up(rows.extent, most, rows.groups.even and rows.whole))
