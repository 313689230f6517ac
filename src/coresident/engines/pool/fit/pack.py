"""What the one process of a pack takes of a card over its life: base and all learners' adapters, then its captured step
(`packed.written`), in a pool of memory of the graph's own, and at the end the check of what was learned. A plain step is
`plain_pack`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from coresident.engines.pool.fit.architecture import Architecture
from coresident.engines.pool.fit.decoder import Decoder
from coresident.engines.pool.fit.forward import (
    ACTIVATIONS,
    ADAPTER,
    BASE,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    TRANSIENTS,
    WORKSPACE,
    WORKSPACES,
)
from coresident.engines.pool.fit.heap import Block, Heap
from coresident.engines.pool.fit.together import Together
from coresident.engines.pool.learning.chunks import chunk_rows

if TYPE_CHECKING:
    from coresident.engines.pool.parameters import DPO

# As `packed.written` has it.
LOGITS_BUDGET = 512 << 20
# What the compiled step of a learner's 8-bit moments writes out on the way: both moments in float32, since numbers and
# the largest of their blocks are two kernels (read off the code that Inductor makes of `packed.optimiser.advance`). With
# whole moments it is one kernel, which writes nothing but results.
WRITTEN_OUT = 2


def row(shape: Architecture, settings: DPO, adapted: Mapping[str, tuple[int, int]]) -> int:
    """Numbers of one learner's adapter."""
    return settings.rank * sum(map(sum, adapted.values())) * shape.layers


def arena(heap: Heap, numbers: int, eight: bool, exact: int, products: int) -> None:
    """All learners' adapters of so many `numbers`, with their moments and gradients (`packed.arena`)."""
    heap.take(numbers * exact, ADAPTER)
    for _ in range(2):
        heap.take(numbers * (1 if eight else exact), OPTIMIZER)
        if eight:
            heap.take(numbers / 64, OPTIMIZER)
    if products != exact:
        heap.take(numbers * products, ADAPTER)
    heap.take(numbers * products, GRADIENTS)


def looked_over(heap: Heap, row: int) -> None:
    """What lies beyond a learner's rank is looked for before its adapter is kept (`packed.arena.check_beyond`): masks of its
    row, and their sum, which PyTorch takes of 64-bit numbers.
    """
    within, other, without, both = (heap.take(row, TRANSIENTS) for _ in range(4))
    heap.give(other, without)
    heap.give(heap.take(row * 8, TRANSIENTS), within, both)


class Pack(Decoder):
    """`learners` adapters in one process. `own` holds its memory, and `heap` that of its graphs: what is free in one is
    of no use to the other.
    """

    def __init__(
        self, shape: Architecture, settings: DPO, nf4: bool, learners: int, own: Heap, graphs: Heap
    ) -> None:
        super().__init__(shape, settings, nf4, graphs)
        self.own, self.learners = own, learners
        self.row = row(shape, settings, self.adapted)
        self.eight = settings.optimizer == "adamw8bit"

    def start(self, base: int) -> None:
        """The base, the adapters with all that belongs to them, and a workspace for each of the two streams."""
        self.own.take(WORKSPACE, WORKSPACES)
        self.heap.take(WORKSPACE, WORKSPACES)
        self.own.take(base, BASE)
        arena(self.own, self.row * self.learners, self.eight, self.exact, self.products)

    def step(self, rows: Together) -> None:
        """One step."""
        take, give = self.heap.take, self.heap.give
        width = self.shape.width
        if self.settings.loss == "dpo" and self.settings.reference == "each-step":
            hidden, _ = self.forward(rows, keep=False)
            self._scores(rows, slopes=False)
            give(hidden)
        hidden, kept = self.forward(rows, keep=True)
        slopes = self._scores(rows, slopes=True)
        give(hidden)
        gradient = take(rows.tokens * width * self.wide, TRANSIENTS)
        product = take(rows.scored * width * self.exact, TRANSIENTS)
        rounded = take(rows.scored * width * self.wide, TRANSIENTS)
        give(product, rounded, *slopes)
        self.backward(rows, kept)
        if self.eight:
            give(*[take(self.row * 4, TRANSIENTS) for _ in range(WRITTEN_OUT)])
        give(gradient)

    def finish(self) -> None:
        """What it does before adapters are kept."""
        looked_over(self.own, self.row)

    def _scores(self, rows: Together, slopes: bool) -> list[Block]:
        """Log-probabilities, chunk by chunk; what is kept are their gradients by the hidden states."""
        take, give = self.heap.take, self.heap.give
        r, shape = rows.scored, self.shape
        chosen, scores = take(r * shape.width * self.wide, TRANSIENTS), take(r * self.exact, ACTIVATIONS)
        found = [take(r * shape.width * self.wide, ACTIVATIONS)] if slopes else []
        size = chunk_rows(r, shape.vocabulary, self.wide, LOGITS_BUDGET)
        for start in range(0, r, size):
            logits = take(min(size, r - start) * shape.vocabulary * self.wide, LOGITS)
            if not slopes:
                give(logits)
                continue
            slope = take(min(size, r - start) * shape.vocabulary * self.wide, LOGITS)
            give(logits)
            give(slope)
        give(chosen, scores)
        return found
