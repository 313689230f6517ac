"""What one learner's process takes of a card over its life: base, adapter, then step after step, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from coresident.engines.pool.fit import optimizer
from coresident.engines.pool.fit.architecture import Architecture
from coresident.engines.pool.fit.forward import (
    ADAPTER,
    BASE,
    GRADIENTS,
    TRANSIENTS,
    WORKSPACE,
    WORKSPACES,
    Forward,
    Kept,
    Rows,
)
from coresident.engines.pool.fit.heap import Block, Heap

if TYPE_CHECKING:
    from coresident.engines.pool.parameters import DPO


class Learner(Forward):
    """One process's memory: `heap` holds it."""

    def __init__(self, shape: Architecture, settings: DPO, nf4: bool, heap: Heap) -> None:
        super().__init__(shape, settings, nf4, heap)
        self.grown: list[Block] = []
        self.started = False

    def start(self, base: int) -> None:
        """The context's first product, the base where it is this process's own (bytes, else 0), and the adapter."""
        self.heap.take(WORKSPACE, WORKSPACES)
        if base:
            self.heap.take(base, BASE)
        for _ in range(self.shape.layers):
            for inputs, outputs in self.adapted.values():
                for numbers in (inputs, outputs):
                    self.heap.take(self.settings.rank * numbers * self.exact, ADAPTER)

    def step(self, rows: Rows) -> None:
        """One optimiser step on the batch."""
        settings = self.settings
        if settings.loss == "dpo" and settings.reference == "each-step":
            self.forward(rows, graph=False)
        kept = self.forward(rows, graph=True)
        self._backward(rows, kept)
        self._optimise()

    def reference(self, rows: Rows) -> None:
        """Log-probabilities of a batch under the base."""
        self.forward(rows, graph=False)

    def _backward(self, rows: Rows, kept: Sequence[Kept]) -> None:
        take, give = self.heap.take, self.heap.give
        if not self.started:
            take(WORKSPACE, WORKSPACES)
        t, shape = rows.tokens, self.shape
        *layers, last = kept
        if rows.scored:
            scaled = take(rows.scored * shape.width * 4, TRANSIENTS)
            rounded = take(rows.scored * shape.width * self.wide, TRANSIENTS)
            give(scaled)
        gradient = take(t * shape.width * self.wide, TRANSIENTS)
        if rows.scored:
            give(rounded)
        self._drop(last, "loss")
        gradient = self._norm_back(t, shape.width, gradient, last.pop("norm"))
        if self.nf4:
            largest = max(inputs * outputs for inputs, outputs in shape.projections().values())
            self.room = take(largest * self.wide, TRANSIENTS)
        for number, layer in reversed(list(enumerate(layers))):
            if self.settings.checkpointing:
                layer |= self._layer(rows, graph=True, first=number == 0)
            gradient = self._layer_back(rows, gradient, layer, first=number == 0)
        give(gradient)
        if self.room is not None:
            give(self.room)
            self.room = None
        self._drop(last, "rotary")

    def _norm_back(self, t: int, width: int, gradient: Block, kept: Iterable[Block]) -> Block:
        """The gradient of its input, in place of that of its output."""
        take, give = self.heap.take, self.heap.give
        size = t * width * 4
        scaled = take(t * width * self.wide, TRANSIENTS)
        give(gradient)
        exact = take(size, TRANSIENTS)
        give(scaled)
        direct, product = take(size, TRANSIENTS), take(size, TRANSIENTS)
        give(product, exact)
        # Of the mean of squares: that of each number.
        spread = take(size, TRANSIENTS)
        power, twice = take(size, TRANSIENTS), take(size, TRANSIENTS)
        squared = take(size, TRANSIENTS)
        give(twice, power, spread, *kept)
        total = take(size, TRANSIENTS)
        give(direct, squared)
        found = take(t * width * self.wide, TRANSIENTS)
        give(total)
        return found

    def _layer_back(self, rows: Rows, gradient: Block, kept: Kept, first: bool) -> Block:
        """`gradient` is of the layer's output, [t, width]; what comes back is of its input. `kept` is freed as it goes."""
        take, give, drop = self.heap.take, self.heap.give, self._drop
        t, shape, w = rows.tokens, self.shape, self.wide
        # The residual's gradient is the output's, and stays while the block's is worked out.
        inner = self._product_back("down_proj", t, kept)
        drop(kept, "inner")
        for_up, for_opened = take(t * shape.hidden * w, TRANSIENTS), take(t * shape.hidden * w, TRANSIENTS)
        drop(kept, "opened", "up")
        give(inner)
        x = self._product_back("up_proj", t, kept)
        give(for_up)
        for_gate = take(t * shape.hidden * w, TRANSIENTS)
        drop(kept, "gate")
        give(for_opened)
        other = self._product_back("gate_proj", t, kept)
        drop(kept, "between")
        give(for_gate)
        block = self._norm_back(t, shape.width, self._sum(x, other), kept.pop("middle"))
        total = self._sum(gradient, block)
        attended = self._product_back("o_proj", t, kept)
        query, key, value = self._attention_back(rows)
        drop(kept, "attention", "attended", "heads")
        give(attended)
        key, query = self._rotate_back(key), self._rotate_back(query)
        if first:
            for name, given in (("v_proj", value), ("k_proj", key), ("q_proj", query)):
                self._product_back(name, t, kept, through=False)
                give(given)
            drop(kept, *kept)
            return total
        block = self._product_back("v_proj", t, kept)
        give(value)
        for name, given in (("k_proj", key), ("q_proj", query)):
            other = self._product_back(name, t, kept)
            give(given)
            block = self._sum(block, other)
        drop(kept, "x")
        block = self._norm_back(t, shape.width, block, kept.pop("norm"))
        found = self._sum(block, total)
        drop(kept, *kept)
        return found

    def _sum(self, one: Block, other: Block) -> Block:
        found = self.heap.take(one.asked, TRANSIENTS)
        self.heap.give(one, other)
        return found

    def _rotate_back(self, gradient: Block) -> Block:
        take, give = self.heap.take, self.heap.give
        size = gradient.asked
        turned, half = take(size, TRANSIENTS), take(size / 2, TRANSIENTS)
        parts = [take(size, TRANSIENTS)]
        give(half)
        parts.append(take(size, TRANSIENTS))
        give(turned)
        both = take(size, TRANSIENTS)
        give(*parts)
        plain = take(size, TRANSIENTS)
        found = take(size, TRANSIENTS)
        give(both, plain, gradient)
        return found

    def _attention_back(self, rows: Rows) -> tuple[Block, Block, Block]:
        """The gradients of query, key and value."""
        take, give = self.heap.take, self.heap.give
        t, shape = rows.tokens, self.shape
        if self.settings.deterministic:
            exact = max(self.wide, 4)
            scores = rows.sequences * shape.heads * rows.width**2
            parts = [take(t * shape.queries * exact, TRANSIENTS) for _ in range(4)]
            tables = [take(scores * exact, TRANSIENTS) for _ in range(3)]
            give(*tables)
            found = [
                take(t * size * self.wide, TRANSIENTS) for size in (shape.queries, shape.keys, shape.keys)
            ]
            give(*parts)
            return found[0], found[1], found[2]
        # Of keys and values for each query head, then summed; and what the kernel needs besides.
        query, *wide = (take(t * shape.queries * self.wide, TRANSIENTS) for _ in range(3))
        sums = take(t * shape.queries * 4, TRANSIENTS), take(t * shape.heads * 4, TRANSIENTS)
        give(*sums)
        key, value = (take(t * shape.keys * self.wide, TRANSIENTS) for _ in range(2))
        give(*wide)
        return query, key, value

    def _product_back(self, name: str, t: int, kept: Kept, through: bool = True) -> Block:
        """The gradient of a linear layer's input, but for one that nothing is learned of; the adapter's own are kept."""
        take, give = self.heap.take, self.heap.give
        inputs, outputs = self.shape.projections()[name]
        inner = None
        if name in self.adapted:
            wide = self._converted(t * outputs)
            self._grow(outputs)
            inner = take(t * self.settings.rank * self.products, TRANSIENTS)
            give(*wide)
            self._grow(inputs, self._converted(t * inputs))
        weight = self._weight(name) if through else []
        found = take(t * inputs * self.wide if through else 0, TRANSIENTS)
        give(*weight)
        if inner is not None:
            if through:
                self._add(t * inputs)
            give(inner)
        self._drop(kept, name)
        if not through:
            give(found)
        return found

    def _grow(self, numbers: int, other: Sequence[Block] = ()) -> None:
        """The gradient of an adapter's matrix, which is kept, from a product with `other`."""
        take, give = self.heap.take, self.heap.give
        size = self.settings.rank * numbers
        if self.products == self.exact:
            self.grown.append(take(size * self.exact, GRADIENTS))
            give(*other)
            return
        product = take(size * self.products, TRANSIENTS)
        give(*other)
        self.grown.append(take(size * self.exact, GRADIENTS))
        give(product)

    def _optimise(self) -> None:
        settings = self.settings
        sizes = [
            settings.rank * numbers
            for _ in range(self.shape.layers)
            for pair in self.adapted.values()
            for numbers in pair
        ]
        eight = settings.optimizer == "adamw8bit"
        if not self.started:
            optimizer.start(self.heap, sizes, eight, self.exact)
        self.started = True
        if eight:
            optimizer.step8(self.heap, sizes)
        self.heap.give(*self.grown)
        self.grown = []
