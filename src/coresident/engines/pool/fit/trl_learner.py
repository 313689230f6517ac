"""What a learner of TRL's own takes of a card (`peers.trl`): its DPOTrainer over PEFT's layers, under autocast where products are
in bfloat16. Read off TRL 1.16 and PEFT 0.21; other versions may take more or less.

Both differ from ours in what they keep: each adapted layer has a copy of its input, and the reference's pass comes after the
policy's, whose activations are there meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from coresident.engines.pool.fit.forward import ACTIVATIONS, GRADIENTS, LOGITS, TRANSIENTS, Kept, Rows
from coresident.engines.pool.fit.heap import Block
from coresident.engines.pool.fit.step import Learner

# Rows and columns of a tile of logits (`trl.kernels.chunked_logprob`).
TILE_ROWS, TILE_COLUMNS = 4096, 32768


class TRLLearner(Learner):
    """One process's memory."""

    @property
    def takes_inputs(self) -> bool:
        """Not where it is converted first."""
        return self.wide == self.exact

    def step(self, rows: Rows) -> None:
        """One optimiser step on the batch."""
        kept = self.forward(rows, graph=True)
        if self.settings.reference == "each-step":
            self.forward(rows, graph=False)
        self._backward(rows, kept)
        self._optimise()

    @property
    def _rounds(self) -> bool:
        """Whether an adapter's numbers are converted for its products."""
        return self.products != self.exact

    def _product(self, name: str, t: int, kept: Kept, graph: bool) -> Block:
        take, give = self.heap.take, self.heap.give
        inputs, outputs = self.shape.projections()[name]
        y = take(t * outputs * self.wide, ACTIVATIONS)
        if not (graph and name in self.adapted):
            return y
        rank = self.settings.rank
        # The input in the adapter's dtype, which autocast then rounds again.
        given = [take(t * inputs * self.exact, ACTIVATIONS)] if self.wide != self.exact else []
        copies = list(given)
        if self._rounds:
            copies = [take(size * self.products, ACTIVATIONS) for size in (rank * inputs, t * inputs)]
        copies.append(take(t * rank * self.products, ACTIVATIONS))
        if self._rounds:
            copies.append(take(rank * outputs * self.products, ACTIVATIONS))
        added = take(t * outputs * self.products, TRANSIENTS)
        scaled = take(t * outputs * self.products, TRANSIENTS)
        give(added)
        found = take(t * outputs * max(self.wide, self.products), ACTIVATIONS)
        give(scaled, y)
        if self.products > self.wide:
            exact, found = found, take(t * outputs * self.wide, ACTIVATIONS)
            give(exact)
        if self._rounds:
            give(*given)
        kept[name] = copies
        return found

    def _product_back(self, name: str, t: int, kept: Kept, through: bool = True) -> Block:
        take, give = self.heap.take, self.heap.give
        inputs, outputs = self.shape.projections()[name]
        found = take(t * inputs * self.wide if through else 0, TRANSIENTS)
        if name in self.adapted:
            exact = [take(t * outputs * self.products, TRANSIENTS)] if self.products > self.wide else []
            scaled = take(t * outputs * self.products, TRANSIENTS)
            inner = take(t * self.settings.rank * self.products, TRANSIENTS)
            self._grow(outputs)
            give(scaled)
            self._grow(inputs)
            # The way back of each conversion of the input.
            sizes = dict.fromkeys((self.products, self.exact, self.wide)) if through else {}
            back = [take(t * inputs * size, TRANSIENTS) for size in sizes]
            give(*back, inner, *exact)
            self._drop(kept, name)
        if not through:
            give(found)
        return found

    def _grow(self, numbers: int, other: Sequence[Block] = ()) -> None:  # noqa: ARG002 - none is made for it
        take, give = self.heap.take, self.heap.give
        size = self.settings.rank * numbers
        rounded = [take(size * self.products, TRANSIENTS)] if self._rounds else []
        self.grown.append(take(size * self.exact, GRADIENTS))
        give(*rounded)

    def _loss(self, rows: Rows, graph: bool) -> list[Block]:
        take, give = self.heap.take, self.heap.give
        chosen = take(rows.scored * self.shape.width * self.wide, ACTIVATIONS)
        figures = [take(rows.scored * 4, ACTIVATIONS) for _ in range(7)]
        self._tile(rows)
        if graph:
            return [chosen, *figures]
        give(chosen, *figures)
        return []

    def _backward(self, rows: Rows, kept: Sequence[Kept]) -> None:
        take, give = self.heap.take, self.heap.give
        slopes = take(rows.scored * self.shape.width * 4, TRANSIENTS)
        self._tile(rows)
        give(slopes)
        super()._backward(rows, kept)

    def _tile(self, rows: Rows) -> None:
        columns = min(TILE_COLUMNS, self.shape.vocabulary)
        self.heap.give(self.heap.take(min(rows.scored, TILE_ROWS) * columns * self.wide, LOGITS))
