"""What a pack takes of a card whose steps are plain (`step: eager`): the learner's own modules over the rows of all.

`packed.step` and `packed.policy` written down as sizes, where they are not `forward` and `step`. It must be changed where
they are; a test compares what is kept for the backward pass with what autograd keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coresident.engines.pool.fit.architecture import Architecture
from coresident.engines.pool.fit.forward import ACTIVATIONS, BASE, TRANSIENTS, WORKSPACE, WORKSPACES, Rows
from coresident.engines.pool.fit.heap import Block, Heap
from coresident.engines.pool.fit.pack import arena, looked_over, row
from coresident.engines.pool.fit.step import Learner
from coresident.engines.pool.fit.together import Together

if TYPE_CHECKING:
    from coresident.engines.pool.parameters import DPO


class PlainPack(Learner):
    """`learners` adapters in one process, whose memory `heap` holds."""

    def __init__(self, shape: Architecture, settings: DPO, nf4: bool, learners: int, heap: Heap) -> None:
        super().__init__(shape, settings, nf4, heap)
        self.learners, self.row = learners, row(shape, settings, self.adapted)
        self.together: Together | None = None

    def start(self, base: int) -> None:
        """The base, and the adapters with all that belongs to them."""
        self.heap.take(WORKSPACE, WORKSPACES)
        self.heap.take(base, BASE)
        eight = self.settings.optimizer == "adamw8bit"
        arena(self.heap, self.row * self.learners, eight, self.exact, self.products)

    def steps(self, found: Sequence[Together]) -> None:
        """Step after step, and the check of what was learned."""
        for one in found:
            self.together = one
            # To all but attention the rows of a step are one long sequence.
            self.step(Rows(1, one.tokens, one.scored))
        looked_over(self.heap, self.row)

    @property
    def _rectangle(self) -> Rows:
        """The rows as attention has them."""
        assert self.together is not None
        return Rows(self.together.sequences, self.together.longest, self.together.scored)

    def _attend(self, rows: Rows, turned: list[Block], value: Block) -> tuple[Block, list[Block]]:
        there = self._rectangle
        if there.tokens == rows.tokens:
            return super()._attend(there, turned, value)
        laid = [
            self._states(there, width) for width in (self.shape.queries, self.shape.keys, self.shape.keys)
        ]
        self.heap.give(*turned, value)
        mixed, kept = super()._attend(there, laid[:2], laid[2])
        return self._states(rows, self.shape.queries), [*kept, mixed]

    def _attention_back(self, rows: Rows) -> tuple[Block, Block, Block]:
        there = self._rectangle
        if there.tokens == rows.tokens:
            return super()._attention_back(there)
        laid = self._states(there, self.shape.queries, TRANSIENTS)
        query, key, value = super()._attention_back(there)
        self.heap.give(laid)
        # Taken back row by row, the last that was made first.
        back = []
        for block, width in ((value, self.shape.keys), (key, self.shape.keys), (query, self.shape.queries)):
            back.append(self._states(rows, width, TRANSIENTS))
            self.heap.give(block)
        return back[2], back[1], back[0]

    def _states(self, rows: Rows, width: int, kind: str = ACTIVATIONS) -> Block:
        return self.heap.take(rows.tokens * width * self.wide, kind)

    def _copies(self, inputs: int, outputs: int) -> list[Block]:  # noqa: ARG002 - there are none
        """The arena has them."""
        return []

    def _add(self, numbers: int) -> None:
        """Added in place, where it need not be rounded first."""
        if self.wide != self.products:
            super()._add(numbers)

    def _grow(self, numbers: int, other: Sequence[Block] = ()) -> None:  # noqa: ARG002 - all are as large
        """Written into the arena's gradients."""
        self.heap.give(*other)

    def _optimise(self) -> None:
        """A part at a time, in memory that is free by then."""
        self.started = True
