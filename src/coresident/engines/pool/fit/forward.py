"""What a learner's forward pass takes of a card, in the order in which it takes it.

With `step` this is the training step of `learning` written down as sizes: each tensor that an operation makes, and when
it goes. It must be changed where that is; a test compares what is kept for the backward pass with what autograd keeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coresident.engines.pool.fit.architecture import Architecture
from coresident.engines.pool.fit.heap import Block, Heap
from coresident.engines.pool.learning.chunks import chunk_rows

if TYPE_CHECKING:
    from coresident.engines.pool.parameters import DPO

BASE, ADAPTER, OPTIMIZER, GRADIENTS = "base", "adapter", "optimizer", "gradients"
ACTIVATIONS, LOGITS, TRANSIENTS, WORKSPACES = "activations", "logits", "transients", "workspaces"
KINDS = (BASE, ADAPTER, OPTIMIZER, GRADIENTS, ACTIVATIONS, LOGITS, TRANSIENTS, WORKSPACES)

WIDTHS = {"float32": 4, "bfloat16": 2, "float64": 8}
# cuBLAS on Hopper (PyTorch's default, CUBLAS_WORKSPACE_CONFIG unset): one workspace for the forward pass's thread and
# one for the backward pass's.
WORKSPACE = 32 << 20

# What is kept of a part of the step for its backward pass, by what it belongs to.
Kept = dict[str, list[Block]]


@dataclass(frozen=True)
class Rows:
    """One batch: `sequences` rows of `width` tokens, `padding` in all among them, of which `scored` are predicted."""

    sequences: int
    width: int
    scored: int
    padding: int = 0

    @property
    def tokens(self) -> int:
        """Positions that are computed where rows are padded."""
        return self.sequences * self.width

    @property
    def real(self) -> int:
        """Tokens that are not padding."""
        return self.tokens - self.padding


class Forward:
    """Over `heap`, which holds the process's memory. `nf4` says whether the linear layers are dequantised for each product."""

    def __init__(self, shape: Architecture, settings: DPO, nf4: bool, heap: Heap) -> None:
        self.shape, self.settings, self.nf4, self.heap = shape, settings, nf4, heap
        self.wide = WIDTHS[settings.dtype]
        # For the dequantised weights of a backward pass, while there is one.
        self.room: Block | None = None
        self.exact = 8 if settings.dtype == "float64" else 4
        # Of the adapters' products.
        self.products = self.wide if settings.adapter_products == "bfloat16" else self.exact
        self.adapted = {
            name: sizes for name, sizes in shape.projections().items() if targeted(name, settings.targets)
        }

    @property
    def takes_inputs(self) -> bool:
        """Whether an adapted layer's backward pass takes the layer's input; else it has kept what it needs of it by itself."""
        return True

    def forward(self, rows: Rows, graph: bool) -> list[Kept]:
        """What is kept for the backward pass, layer by layer, and last of the loss."""
        take, give = self.heap.take, self.heap.give
        t, shape = rows.tokens, self.shape
        kept: list[Kept] = []
        hidden = take(t * shape.width * self.wide, ACTIVATIONS)
        rotary = [take(rows.width * shape.queries // shape.heads * self.wide, ACTIVATIONS) for _ in range(2)]
        for number in range(shape.layers):
            layer = self._layer(rows, graph and not self.settings.checkpointing, number == 0)
            following = take(t * shape.width * self.wide, ACTIVATIONS)
            if graph and self.settings.checkpointing:
                # A layer's input is all that is kept of it.
                kept.append({"input": [hidden]})
            else:
                give(hidden)
                kept.append(layer)
            hidden = following
        last = self._norm(t, shape.width, graph)
        output = take(t * shape.width * self.wide, ACTIVATIONS)
        give(hidden)
        kept.append({"norm": last, "loss": self._loss(rows, graph), "rotary": rotary})
        give(output)
        if not graph:
            for part in kept:
                self._drop(part, *part)
        return kept

    def _drop(self, kept: Kept, *names: str) -> None:
        """Give back what is kept of these parts."""
        for name in list(names):
            self.heap.give(*kept.pop(name, []))

    def _norm(self, t: int, width: int, graph: bool, count: int = 1) -> list[Block]:
        """RMSNorm over `count` rows of `width` for each of `t` tokens. Returns what is kept; its output is the caller's."""
        take, give = self.heap.take, self.heap.give
        size = t * count * width * 4
        # In float32 the input is not copied, and is what is kept instead.
        exact = take(size, ACTIVATIONS)
        squares = take(size, TRANSIENTS)
        scale = take(t * count * 4, ACTIVATIONS)
        give(squares)
        scaled = take(size, TRANSIENTS)
        rounded = take(t * count * width * self.wide, TRANSIENTS)
        give(scaled, rounded)
        return self._kept([exact, scale], graph)

    def _layer(self, rows: Rows, graph: bool, first: bool) -> Kept:
        """One decoder layer but its output. Returns what is kept of it, all of it where there is a graph.

        The `first` one's input is an embedding, which nothing is learned of.
        """
        take, give = self.heap.take, self.heap.give
        t, shape, w = rows.tokens, self.shape, self.wide
        kept: Kept = {"norm": self._norm(t, shape.width, graph and not first)}
        kept["x"] = [take(t * shape.width * w, ACTIVATIONS)]
        query = self._product("q_proj", t, kept, graph)
        key = self._product("k_proj", t, kept, graph)
        value = self._product("v_proj", t, kept, graph)
        if not self.takes_inputs:
            self._drop(kept, "x")
        if shape.normed:
            head = shape.queries // shape.heads
            kept["heads"] = []
            for count, old in ((shape.heads, query), (shape.keys // head, key)):
                kept["heads"] += self._norm(t, head, graph, count)
                give(take(old.asked, TRANSIENTS))
        turned = [self._rotate(t * shape.queries * w), self._rotate(t * shape.keys * w)]
        give(query, key)
        attended, kept["attention"] = self._attend(rows, turned, value)
        if not graph:
            self._drop(kept, "x", "attention")
        out = self._product("o_proj", t, kept, graph)
        kept["attended"] = [attended]
        if not graph:
            self._drop(kept, "attended")
        residual = take(t * shape.width * w, ACTIVATIONS)
        give(out)
        kept["middle"] = self._norm(t, shape.width, graph)
        kept["between"] = [take(t * shape.width * w, ACTIVATIONS)]
        kept["gate"] = [self._product("gate_proj", t, kept, graph)]
        kept["opened"] = [take(t * shape.hidden * w, ACTIVATIONS)]
        kept["up"] = [self._product("up_proj", t, kept, graph)]
        if not self.takes_inputs:
            self._drop(kept, "between")
        kept["inner"] = [take(t * shape.hidden * w, ACTIVATIONS)]
        if not graph:
            self._drop(kept, "gate", "opened", "up", "between")
        out = self._product("down_proj", t, kept, graph)
        if not (graph and self.takes_inputs):
            self._drop(kept, "inner")
        give(out, residual)
        return kept

    def _attend(self, rows: Rows, turned: list[Block], value: Block) -> tuple[Block, list[Block]]:
        """Attention's output, and what is kept of it."""
        if self.settings.deterministic:
            return self._attend_plainly(rows, turned, value)
        attended = self.heap.take(rows.tokens * self.shape.queries * self.wide, ACTIVATIONS)
        return attended, [*turned, value, self.heap.take(rows.tokens * self.shape.heads * 4, ACTIVATIONS)]

    def _attend_plainly(self, rows: Rows, turned: list[Block], value: Block) -> tuple[Block, list[Block]]:
        """PyTorch's plain attention, which a deterministic run takes: scores of all pairs of tokens, in float32 at least.
        Returns its output, and what is kept.
        """
        take, give = self.heap.take, self.heap.give
        exact = max(self.wide, 4)
        states = rows.tokens * self.shape.queries
        scores = rows.sequences * self.shape.heads * rows.width**2
        # Query, key and value, converted, scaled, and laid out anew for each head.
        kept = []
        for given in (*turned, value):
            converted = take(states * exact, TRANSIENTS)
            scaled = take(states * exact, TRANSIENTS)
            kept.append(take(states * exact, ACTIVATIONS))
            give(converted, scaled, given)
        raw = take(scores * exact, TRANSIENTS)
        shares = take(scores * exact, TRANSIENTS)
        masked = take(scores, TRANSIENTS)
        safe = take(scores * exact, ACTIVATIONS)
        give(masked, shares, raw)
        mixed = take(states * exact, TRANSIENTS)
        rounded = take(states * self.wide, TRANSIENTS)
        spare = take(scores * self.wide, TRANSIENTS)
        give(mixed, spare)
        found = take(states * self.wide, ACTIVATIONS)
        give(rounded)
        return found, [*kept, safe]

    def _rotate(self, size: float) -> Block:
        """x cos + rotated(x) sin: what is kept is the sum."""
        take, give = self.heap.take, self.heap.give
        plain, rotated = take(size, TRANSIENTS), take(size, TRANSIENTS)
        turned = take(size, TRANSIENTS)
        give(rotated)
        found = take(size, ACTIVATIONS)
        give(plain, turned)
        return found

    def _product(self, name: str, t: int, kept: Kept, graph: bool) -> Block:
        """A linear layer with its adapter: y, and in `kept` the r-wide product."""
        take, give = self.heap.take, self.heap.give
        inputs, outputs = self.shape.projections()[name]
        adapted = graph and name in self.adapted
        copies = self._copies(inputs, outputs) if adapted else []
        weight = self._weight(name)
        y = take(t * outputs * self.wide, ACTIVATIONS)
        give(*weight)
        if not adapted:
            return y
        wide = self._converted(t * inputs)
        narrow = take(t * self.settings.rank * self.products, ACTIVATIONS)
        self._add(t * outputs)
        give(*wide)
        kept[name] = [*copies, narrow]
        return y

    def _copies(self, inputs: int, outputs: int) -> list[Block]:
        """An adapter in the dtype of its products, where that is another: the backward pass takes it too."""
        if self.products == self.exact:
            return []
        rank = self.settings.rank
        return [self.heap.take(rank * numbers * self.products, ACTIVATIONS) for numbers in (inputs, outputs)]

    def _add(self, numbers: int) -> None:
        """What an adapter adds to a product of so many numbers."""
        self.heap.give(self.heap.take(numbers * self.products, TRANSIENTS))

    def _converted(self, numbers: int) -> list[Block]:
        """A copy in the dtype of the adapters' products, where that is another."""
        return [] if self.wide == self.products else [self.heap.take(numbers * self.products, TRANSIENTS)]

    def _weight(self, name: str) -> list[Block]:
        """A dequantised weight; none where it has its room."""
        if not self.nf4 or self.room is not None:
            return []
        inputs, outputs = self.shape.projections()[name]
        return [self.heap.take(inputs * outputs * self.wide, TRANSIENTS)]

    def _loss(self, rows: Rows, graph: bool) -> list[Block]:
        """Log-probabilities, chunk by chunk (`logprobs`): what is kept is a gradient for each scored row."""
        take, give = self.heap.take, self.heap.give
        r, shape = rows.scored, self.shape
        exact = max(self.wide, 4)
        chosen = take(r * shape.width * self.wide, TRANSIENTS)
        scored = take(r * exact, ACTIVATIONS)
        slopes = [take(r * shape.width * self.wide, ACTIVATIONS)] if graph else []
        size = chunk_rows(r, shape.vocabulary, exact)
        for start in range(0, r, size):
            part = min(size, r - start)
            logits = [take(part * shape.vocabulary * self.wide, LOGITS)]
            if self.wide != exact:
                # PyTorch converts bfloat16 first, and then makes the table.
                logits.append(take(part * shape.vocabulary * exact, LOGITS))
            table = take(part * shape.vocabulary * exact, LOGITS)
            give(*logits)
            if graph and self.wide != exact:
                give(take(part * shape.vocabulary * self.wide, LOGITS))
            give(table)
        give(chosen)
        return [scored, *slopes]

    def _kept(self, blocks: list[Block], graph: bool) -> list[Block]:
        if graph:
            return blocks
        self.heap.give(*blocks)
        return []


def targeted(name: str, targets: Iterable[str]) -> bool:
    """Whether the linear layer of this name gets an adapter."""
    return any(target == name or target.endswith(f".{name}") for target in targets)
