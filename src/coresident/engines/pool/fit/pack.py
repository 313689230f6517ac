"""What the one process of a pack takes of a card: `step`'s sizes for the step whose backward pass is written out
(`packed.decoder`), over all learners' rows at once. Compiled: nothing but the results of each kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from coresident.engines.pool.fit.architecture import Architecture
from coresident.engines.pool.fit.forward import (
    ACTIVATIONS,
    ADAPTER,
    BASE,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    TRANSIENTS,
    WIDTHS,
    WORKSPACE,
    WORKSPACES,
    Rows,
    targeted,
)
from coresident.engines.pool.fit.heap import Block, Heap
from coresident.engines.pool.learning.chunks import chunk_rows

if TYPE_CHECKING:
    from coresident.engines.pool.parameters import DPO

# As `packed.written` and `packed.captured` have them.
LOGITS_BUDGET = 512 << 20
EACH, SCORED = 64, 128
# Projections that read one input.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


class Pack:
    """`learners` adapters in one process. `heap` holds its memory."""

    def __init__(self, shape: Architecture, settings: DPO, nf4: bool, learners: int, heap: Heap) -> None:
        self.shape, self.settings, self.nf4, self.heap = shape, settings, nf4, heap
        self.learners = learners
        self.wide = WIDTHS[settings.dtype]
        self.exact = 8 if settings.dtype == "float64" else 4
        self.products = self.wide if settings.adapter_products == "bfloat16" else self.exact
        self.adapted = {
            name: sizes for name, sizes in shape.projections().items() if targeted(name, settings.targets)
        }

    @property
    def row(self) -> int:
        """Numbers of one learner's adapter."""
        each = sum(inputs + outputs for inputs, outputs in self.adapted.values())
        return self.settings.rank * each * self.shape.layers

    def start(self, base: int) -> None:
        """The context's first product, the base, and the adapters with all that belongs to them."""
        take = self.heap.take
        take(WORKSPACE, WORKSPACES)
        take(base, BASE)
        numbers = self.row * self.learners
        take(numbers * self.exact, ADAPTER)
        eight = self.settings.optimizer == "adamw8bit"
        for _ in range(2):
            take(numbers * (1 if eight else self.exact), OPTIMIZER)
            if eight:
                take(numbers / 64, OPTIMIZER)
        if self.products != self.exact:
            take(numbers * self.products, ADAPTER)
        take(numbers * self.products, GRADIENTS)

    def step(self, rows: Rows) -> None:
        """One step; `rows` are one learner's."""
        every = _together(rows, self.learners)
        if self.settings.loss == "dpo" and self.settings.reference == "each-step":
            self._give(self.forward(every, graph=False))
        kept = self.forward(every, graph=True)
        self._backward(every, kept)

    def forward(self, rows: Rows, graph: bool) -> list[list[Block]]:
        """What is kept: each layer's (with checkpointing what it took in), and last what the loss and the norm before it need."""
        take, give = self.heap.take, self.heap.give
        t, shape, w = rows.tokens, self.shape, self.wide
        keep = graph and not self.settings.checkpointing
        angles = [take(t * shape.queries // shape.heads * w, ACTIVATIONS) for _ in range(2)]
        x, more = take(t * shape.width * w, ACTIVATIONS), None
        kept: list[list[Block]] = []
        for number in range(shape.layers):
            middle, after, saved = self._layer(t, more, keep)
            if keep:
                # What went in is kept as a sum, or is the embedding; what is left has the next layer keep it.
                kept.append([*saved, middle] if number else [*saved, middle, x])
                give(*([more] if more is not None else []))
            elif graph:
                kept.append([x] if more is None else [x, more])
            else:
                give(x, *([more] if more is not None else []))
            x, more = middle, after
        final, hidden = take(t * shape.width * w, ACTIVATIONS), take(t * shape.width * w, ACTIVATIONS)
        if not keep:
            give(x)
        if more is not None:
            give(more)
        kept.append([*self._loss(rows, graph), final, *angles])
        give(hidden)
        return kept

    def _layer(self, t: int, more: Block | None, keep: bool) -> tuple[Block, Block, list[Block]]:
        """What comes out, in two parts, and what else is kept (where it is)."""
        take, give = self.heap.take, self.heap.give
        shape, w = self.shape, self.wide
        saved = [] if more is None else [take(t * shape.width * w, ACTIVATIONS)]
        saved.append(take(t * shape.width * w, ACTIVATIONS))
        (query, key, value), narrow = self._forth(TOGETHER[0], t, keep)
        turned = [take(t * shape.queries * w, ACTIVATIONS), take(t * shape.keys * w, ACTIVATIONS)]
        give(query, key)
        saved += [value, *turned, take(t * shape.queries * w, ACTIVATIONS), *narrow]
        saved.append(take(t * shape.heads * 4, ACTIVATIONS))
        (attended,), narrow = self._forth(TOGETHER[1], t, keep)
        middle = take(t * shape.width * w, ACTIVATIONS)
        saved += [take(t * shape.width * w, ACTIVATIONS), *narrow]
        give(attended)
        gates, narrow = self._forth(TOGETHER[2], t, keep)
        saved += [*gates, take(t * shape.hidden * w, ACTIVATIONS), *narrow]
        (after,), narrow = self._forth(TOGETHER[3], t, keep)
        saved += narrow
        if keep:
            return middle, after, saved
        give(*saved)
        return middle, after, []

    def _forth(self, names: tuple[str, ...], t: int, graph: bool) -> tuple[list[Block], list[Block]]:
        take, give = self.heap.take, self.heap.give
        sizes = self.shape.projections()
        found = []
        for name in names:
            weight = self._weight(name)
            found.append(take(t * sizes[name][1] * self.wide, ACTIVATIONS))
            give(*weight)
        adapted = [name for name in names if name in self.adapted]
        if not graph or not adapted:
            return found, []
        wide = self._converted(t * sizes[names[0]][0])
        narrow = take(t * self.settings.rank * len(adapted) * self.products, ACTIVATIONS)
        give(*wide)
        for name in adapted:
            give(*self._converted(t * sizes[name][1]))
        return found, [narrow]

    def _backward(self, rows: Rows, kept: list[list[Block]]) -> None:
        take, give = self.heap.take, self.heap.give
        t, shape, w = rows.tokens, self.shape, self.wide
        *layers, last = kept
        give(take(rows.scored * shape.width * 4, TRANSIENTS))
        gradient = take(t * shape.width * w, TRANSIENTS)
        beside = take(t * shape.width * w, TRANSIENTS)
        towards = take(t * shape.width * w, TRANSIENTS)
        give(gradient, beside, *last[:-2])
        for number, layer in reversed(list(enumerate(layers))):
            if self.settings.checkpointing:
                middle, after, saved = self._layer(t, layer[-1] if number else None, keep=True)
                give(middle, after)
                layer = [*saved, *layer]
            towards = self._layer_back(t, towards, layer)
        give(towards, *last[-2:])

    def _layer_back(self, t: int, towards: Block, kept: list[Block]) -> Block:
        take, give = self.heap.take, self.heap.give
        shape, w = self.shape, self.wide
        inner = self._back(TOGETHER[3], t)
        gates = [take(t * shape.hidden * w, TRANSIENTS) for _ in range(2)]
        give(inner)
        inner = self._back(TOGETHER[2], t)
        give(*gates)
        through = take(t * shape.width * w, TRANSIENTS)
        give(inner, towards)
        inner = self._back(TOGETHER[1], t)
        heads = [take(t * shape.queries * w, TRANSIENTS) for _ in range(3)]
        sums = take(t * shape.queries * 4, TRANSIENTS), take(t * shape.heads * 4, TRANSIENTS)
        keys = [take(t * shape.keys * w, TRANSIENTS) for _ in range(2)]
        give(*sums, *heads[1:], inner)
        turned = [take(t * shape.queries * w, TRANSIENTS), take(t * shape.keys * w, TRANSIENTS)]
        give(heads[0], keys[0])
        inner = self._back(TOGETHER[0], t)
        give(*turned, keys[1])
        found = take(t * shape.width * w, TRANSIENTS)
        give(inner, through, *kept)
        return found

    def _back(self, names: tuple[str, ...], t: int) -> Block:
        take, give = self.heap.take, self.heap.give
        sizes = self.shape.projections()
        inputs = sizes[names[0]][0]
        back: Block | None = None
        for name in names:
            weight = self._weight(name)
            found = take(t * inputs * self.wide, TRANSIENTS)
            give(*weight)
            # A float weight's product is added by the product itself.
            if back is None:
                back = found
            else:
                give(found)
        assert back is not None
        adapted = [name for name in names if name in self.adapted]
        if adapted:
            inner = take(t * self.settings.rank * len(adapted) * self.products, TRANSIENTS)
            for name in adapted:
                give(*self._converted(t * sizes[name][1]))
            give(*self._converted(t * inputs))
            # What the adapters add has their type, and is rounded once where that is another.
            give(*self._converted(t * inputs))
            give(inner)
        return back

    def _loss(self, rows: Rows, graph: bool) -> list[Block]:
        take, give = self.heap.take, self.heap.give
        r, shape = rows.scored, self.shape
        chosen = take(r * shape.width * self.wide, TRANSIENTS)
        kept = [take(r * self.exact, ACTIVATIONS)]
        if graph:
            kept.append(take(r * shape.width * self.wide, ACTIVATIONS))
        size = chunk_rows(r, shape.vocabulary, self.wide, LOGITS_BUDGET)
        for start in range(0, r, size):
            part = min(size, r - start)
            logits = take(part * shape.vocabulary * self.wide, LOGITS)
            if graph:
                give(take(part * shape.vocabulary * self.wide, LOGITS))
            give(logits)
        give(chosen)
        return kept

    def _weight(self, name: str) -> list[Block]:
        if not self.nf4:
            return []
        inputs, outputs = self.shape.projections()[name]
        return [self.heap.take(inputs * outputs * self.wide, TRANSIENTS)]

    def _converted(self, numbers: int) -> list[Block]:
        return [] if self.wide == self.products else [self.heap.take(numbers * self.products, TRANSIENTS)]

    def _give(self, kept: list[list[Block]]) -> None:
        for part in kept:
            self.heap.give(*part)


def _together(rows: Rows, learners: int) -> Rows:
    """All learners' rows: no padding but what makes their number one of few (`packed.captured`)."""
    tokens = rows.real
    if tokens != rows.tokens:
        tokens = -(-tokens // EACH) * EACH
    scored = min(-(-rows.scored * learners // SCORED) * SCORED, tokens * learners)
    return replace(rows, sequences=1, width=tokens * learners, scored=scored, padding=0)
