"""What one learner's process takes of a card over its life: base, adapter, then step after step, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from coresident.engines.pool.fit.architecture import Architecture
from coresident.engines.pool.fit.forward import (
    ADAPTER,
    BASE,
    GRADIENTS,
    OPTIMIZER,
    TRANSIENTS,
    WORKSPACE,
    WORKSPACES,
    Forward,
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

    def _backward(self, rows: Rows, kept: Sequence[list[Block]]) -> None:
        take, give = self.heap.take, self.heap.give
        if not self.started:
            take(WORKSPACE, WORKSPACES)
        t, shape = rows.tokens, self.shape
        *layers, loss = kept
        if rows.scored:
            give(take(rows.scored * shape.width * 4, TRANSIENTS))
        gradient = take(t * shape.width * self.wide, TRANSIENTS)
        gradient = self._norm_back(t, shape.width, gradient)
        give(*loss[:-2])
        for number, layer in reversed(list(enumerate(layers))):
            if self.settings.checkpointing:
                layer = [*self._layer(rows, graph=True, first=number == 0), *layer]
            gradient = self._layer_back(rows, gradient, layer)
        give(gradient, *loss[-2:])

    def _norm_back(self, t: int, width: int, gradient: Block, count: int = 1) -> Block:
        """The gradient of its input, in place of that of its output."""
        take, give = self.heap.take, self.heap.give
        size = t * count * width * 4
        scaled = take(t * count * width * self.wide, TRANSIENTS)
        give(gradient)
        exact = take(size, TRANSIENTS)
        give(scaled)
        direct, product = take(size, TRANSIENTS), take(size, TRANSIENTS)
        give(exact, product)
        squared = take(size, TRANSIENTS)
        total = take(size, TRANSIENTS)
        give(direct, squared)
        found = take(t * count * width * self.wide, TRANSIENTS)
        give(total)
        return found

    def _layer_back(self, rows: Rows, gradient: Block, kept: Iterable[Block]) -> Block:
        """`gradient` is of the layer's output, [t, width]; what comes back is of its input. `kept` is freed as it goes."""
        take, give = self.heap.take, self.heap.give
        t, shape, w = rows.tokens, self.shape, self.wide
        names = ("down_proj", "up_proj", "gate_proj", "o_proj", "q_proj", "k_proj", "v_proj")
        # The residual's gradient is the output's, and stays while the block's is worked out.
        inner = self._product_back("down_proj", t)
        for_up, for_opened = take(t * shape.hidden * w, TRANSIENTS), take(t * shape.hidden * w, TRANSIENTS)
        give(inner)
        x = self._product_back("up_proj", t)
        give(for_up)
        for_gate = take(t * shape.hidden * w, TRANSIENTS)
        give(for_opened)
        other = self._product_back("gate_proj", t)
        both = take(t * shape.width * w, TRANSIENTS)
        give(for_gate, x, other)
        block = self._norm_back(t, shape.width, both)
        total = take(t * shape.width * w, TRANSIENTS)
        give(gradient, block)
        attended = self._product_back("o_proj", t)
        query, key, value = self._attention_back(rows)
        give(attended)
        parts = []
        for name, given in zip(names[4:], (query, key, value), strict=True):
            parts.append(self._product_back(name, t))
            give(given)
        give(*parts[1:])
        block = self._norm_back(t, shape.width, parts[0])
        found = take(t * shape.width * w, TRANSIENTS)
        give(block, total)
        give(*kept)
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

    def _product_back(self, name: str, t: int) -> Block:
        """The gradient of a linear layer's input; the adapter's own are kept."""
        take, give = self.heap.take, self.heap.give
        inputs, outputs = self.shape.projections()[name]
        adapted = name in self.adapted
        if adapted:
            wide = self._converted(t * outputs)
            self.grown.append(take(outputs * self.settings.rank * self.exact, GRADIENTS))
            inner = take(t * self.settings.rank * self.exact, TRANSIENTS)
            give(*wide)
            wide = self._converted(t * inputs)
            self.grown.append(take(inputs * self.settings.rank * self.exact, GRADIENTS))
            give(*wide)
        weight = self._weight(name)
        found = take(t * inputs * self.wide, TRANSIENTS)
        give(*weight)
        if adapted:
            give(take(t * inputs * self.exact, TRANSIENTS), inner)
        return found

    def _optimise(self) -> None:
        take, give = self.heap.take, self.heap.give
        eight = self.settings.optimizer == "adamw8bit"
        if not self.started:
            for gradient in self.grown:
                numbers = gradient.asked // self.exact
                for _ in range(2):
                    take(numbers if eight and numbers >= 4096 else numbers * 4, OPTIMIZER)
                    if eight:
                        take(numbers / 64, OPTIMIZER)
        self.started = True
        if eight:
            # Five copies of a chunk, in float32 and as indices (`adamw8bit`).
            chunk = min(4 << 20, sum(gradient.asked for gradient in self.grown) // self.exact) * 4
            give(*[take(chunk, TRANSIENTS) for _ in range(6)])
        give(*self.grown)
        self.grown = []
