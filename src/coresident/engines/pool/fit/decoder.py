"""What a pack's decoder takes of a card: `packed.decoder` written down as sizes, in the order in which it takes them and
until when it holds them. Compiled: nothing but the results of each kernel.

It must be changed where that is; a test compares what is kept for the backward pass with what is really kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coresident.engines.pool.fit.architecture import Architecture
from coresident.engines.pool.fit.forward import ACTIVATIONS, TRANSIENTS, WIDTHS, targeted
from coresident.engines.pool.fit.heap import Block, Heap
from coresident.engines.pool.fit.together import Together

if TYPE_CHECKING:
    from coresident.engines.pool.parameters import DPO

# What is kept of a layer, by its name in `packed.decoder`.
Kept = dict[str, Block]

# Projections that read one input.
QKV, OUT, GATE_UP, DOWN = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)
# Attention's own: rows laid out by sequence, and its output so, for its backward pass.
LAID_OUT = ("laid_query", "laid_key", "laid_value", "laid_mixed", "sums")


class Decoder:
    """Takes from `heap`. `nf4` says whether the linear layers are dequantised for each product."""

    def __init__(self, shape: Architecture, settings: DPO, nf4: bool, heap: Heap) -> None:
        self.shape, self.settings, self.nf4, self.heap = shape, settings, nf4, heap
        self.wide = WIDTHS[settings.dtype]
        self.exact = 8 if settings.dtype == "float64" else 4
        self.products = self.wide if settings.adapter_products == "bfloat16" else self.exact
        self.adapted = {
            name: sizes for name, sizes in shape.projections().items() if targeted(name, settings.targets)
        }

    def forward(self, rows: Together, keep: bool) -> tuple[Block, list[Kept]]:
        """Hidden states, and what is kept: each layer's (with checkpointing its two inputs), and last that of the last norm."""
        take, give = self.heap.take, self.heap.give
        shape, size = self.shape, self._width(rows)
        angles = [take(rows.tokens * shape.queries // shape.heads * self.wide, ACTIVATIONS) for _ in range(2)]
        x, more = take(size, ACTIVATIONS), None
        kept: list[Kept] = []
        for number in range(shape.layers):
            middle, after, saved = self._layer(
                rows, more is None, keep and not self.settings.checkpointing, keep
            )
            inputs: Kept = {"x": x} if more is None else {"x": x, "more": more}
            if keep and self.settings.checkpointing:
                kept.append(inputs)
            elif keep:
                # A sum that went in is the `middle` of the layer before; what was added to it is gone.
                kept.append(saved if number else {**saved, "x": x})
                give(*([] if more is None else [more]))
            else:
                give(*inputs.values())
            x, more = middle, after
        final, hidden = take(size, ACTIVATIONS), take(size, ACTIVATIONS)
        if not (keep and not self.settings.checkpointing):
            give(x)
        assert more is not None
        give(more)
        if not keep:
            give(final, *angles)
            return hidden, []
        return hidden, [*kept, {"x": final, "cosine": angles[0], "sine": angles[1]}]

    def backward(self, rows: Together, kept: list[Kept]) -> None:
        """Given the gradient of the hidden states, which is the caller's."""
        take, give = self.heap.take, self.heap.give
        size = self._width(rows)
        last = kept.pop()
        beside, towards = take(size, TRANSIENTS), take(size, TRANSIENTS)
        give(beside, last.pop("x"))
        inputs: Kept = {}
        for number in reversed(range(self.shape.layers)):
            saved = kept.pop()
            if self.settings.checkpointing:
                give(*inputs.values())
                inputs = saved
                _, after, saved = self._layer(rows, number == 0, True, True)
                give(after)
            towards = self._layer_back(rows, towards, saved, number > 0)
        give(towards, *inputs.values(), *last.values())

    def _layer(self, rows: Together, first: bool, keep: bool, adapters: bool) -> tuple[Block, Block, Kept]:
        """What comes out, in two parts, and what is kept (where it is), the first of the two with it."""
        take, give = self.heap.take, self.heap.give
        t, shape, w = rows.tokens, self.shape, self.wide
        saved: Kept = {} if first else {"x": take(self._width(rows), ACTIVATIONS)}
        saved["h"] = take(self._width(rows), ACTIVATIONS)
        query, key, saved["value"] = self._forth(QKV, t, saved, adapters)
        saved["query"] = take(t * shape.queries * w, ACTIVATIONS)
        saved["key"] = take(t * shape.keys * w, ACTIVATIONS)
        give(query, key)
        if not rows.whole:
            for name, numbers in zip(LAID_OUT[:3], (shape.queries, shape.keys, shape.keys), strict=True):
                saved[name] = take(rows.cells * numbers * w, ACTIVATIONS)
        saved["laid_mixed"] = take(rows.cells * shape.queries * w, ACTIVATIONS)
        saved["sums"] = take(rows.cells * shape.heads * 4, ACTIVATIONS)
        if not rows.whole:
            saved["mixed"] = take(t * shape.queries * w, ACTIVATIONS)
            if not keep:
                self._drop(saved, *LAID_OUT)
        (attended,) = self._forth(OUT, t, saved, adapters)
        middle = take(self._width(rows), ACTIVATIONS)
        saved["h2"] = take(self._width(rows), ACTIVATIONS)
        give(attended)
        saved["gate"], saved["up"] = self._forth(GATE_UP, t, saved, adapters)
        saved["activation"] = take(t * shape.hidden * w, ACTIVATIONS)
        (after,) = self._forth(DOWN, t, saved, adapters)
        if keep:
            return middle, after, {**saved, "middle": middle}
        give(*saved.values())
        return middle, after, {}

    def _forth(self, names: tuple[str, ...], t: int, saved: Kept, adapters: bool) -> list[Block]:
        """The projections' outputs; the adapters' narrow products of all of them are `saved`."""
        take, give = self.heap.take, self.heap.give
        sizes = self.shape.projections()
        found = []
        for name in names:
            weight = self._weight(name)
            found.append(take(t * sizes[name][1] * self.wide, ACTIVATIONS))
            give(*weight)
        adapted = [name for name in names if name in self.adapted]
        if adapters and adapted:
            wide = self._converted(t * sizes[names[0]][0])
            saved[f"narrow_{names[0]}"] = take(
                t * self.settings.rank * len(adapted) * self.products, ACTIVATIONS
            )
            give(*wide)
            for name in adapted:
                give(*self._converted(t * sizes[name][1]))
        return found

    def _layer_back(self, rows: Together, towards: Block, saved: Kept, wanted: bool) -> Block:
        """The gradient of a layer's input in place of that of its output; `saved` goes as it does there."""
        take, give = self.heap.take, self.heap.give
        t, shape, w = rows.tokens, self.shape, self.wide
        inner = self._back(DOWN, t)
        gates = [take(t * shape.hidden * w, TRANSIENTS) for _ in range(2)]
        self._drop(saved, "gate", "up")
        give(*inner)
        self._drop(saved, "activation")
        inner = self._back(GATE_UP, t)
        give(*gates)
        self._drop(saved, "h2")
        # The caller's, of the output, stays until this returns.
        through = take(self._width(rows), TRANSIENTS)
        self._drop(saved, "middle")
        attended = self._back(OUT, t)
        give(*inner)
        query, key, value = self._attention_back(rows, saved)
        self._drop(saved, "mixed", *LAID_OUT, "query", "key", "value")
        turned = [take(t * shape.queries * w, TRANSIENTS), take(t * shape.keys * w, TRANSIENTS)]
        give(query, key)
        inner = self._back(QKV, t, wanted)
        give(*attended)
        found = through
        if wanted:
            found = take(self._width(rows), TRANSIENTS)
            give(*inner, through)
        give(*turned, value, *saved.values(), towards)
        return found

    def _attention_back(self, rows: Together, saved: Kept) -> tuple[Block, Block, Block]:
        """The gradients of query, key and value."""
        take, give = self.heap.take, self.heap.give
        t, shape, w, cells = rows.tokens, self.shape, self.wide, rows.cells
        laid = [] if rows.whole else [take(cells * shape.queries * w, TRANSIENTS)]
        found = [take(cells * size * w, TRANSIENTS) for size in (shape.queries, shape.keys, shape.keys)]
        # What the kernel needs besides, and keys' and values' gradients for each query head where several share one.
        apart = [take(cells * shape.heads * 4, TRANSIENTS), take(cells * shape.queries * 4, TRANSIENTS)]
        if shape.keys != shape.queries:
            apart += [take(cells * shape.queries * w, TRANSIENTS) for _ in range(2)]
        give(*apart)
        self._drop(saved, *LAID_OUT)
        if rows.whole:
            return found[0], found[1], found[2]
        give(*laid)
        # Taken back row by row, the last that was made first.
        back = []
        for block, size in ((found[2], shape.keys), (found[1], shape.keys), (found[0], shape.queries)):
            back.append(take(t * size * w, TRANSIENTS))
            give(block)
        return back[2], back[1], back[0]

    def _back(self, names: tuple[str, ...], t: int, wanted: bool = True) -> list[Block]:
        """The gradient of what the projections read, where it is wanted."""
        take, give = self.heap.take, self.heap.give
        sizes = self.shape.projections()
        inputs = sizes[names[0]][0]
        back: list[Block] = []
        for name in names if wanted else ():
            if back and not self.nf4:
                # A float weight's product is added by the product itself.
                continue
            weight = self._weight(name)
            found = take(t * inputs * self.wide, TRANSIENTS)
            give(*weight)
            if back:
                give(found)
            else:
                back = [found]
        adapted = [name for name in names if name in self.adapted]
        if adapted:
            inner = take(t * self.settings.rank * len(adapted) * self.products, TRANSIENTS)
            for name in adapted:
                give(*self._converted(t * sizes[name][1]))
            give(*self._converted(t * inputs))
            # What the adapters add has their type, and is rounded once where that is another.
            if wanted:
                give(*self._converted(t * inputs))
            give(inner)
        return back

    def _width(self, rows: Together) -> int:
        return rows.tokens * self.shape.width * self.wide

    def _drop(self, saved: Kept, *names: str) -> None:
        self.heap.give(*[saved.pop(name) for name in names if name in saved])

    def _weight(self, name: str) -> list[Block]:
        if not self.nf4:
            return []
        inputs, outputs = self.shape.projections()[name]
        return [self.heap.take(inputs * outputs * self.wide, TRANSIENTS)]

    def _converted(self, numbers: int) -> list[Block]:
        return [] if self.wide == self.products else [self.heap.take(numbers * self.products, TRANSIENTS)]
