"""How large the steps of a pack are, told from the batches of some of its learners: all learners' rows together, as they are
or in the shape that a captured step has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coresident.engines.pool.fit.data import STEPS
from coresident.engines.pool.fit.forward import Rows
from coresident.engines.pool.packed.extent import Extent, rounded_up

if TYPE_CHECKING:
    from coresident.engines.pool.parameters import DPO

# As `learning.learner` has it.
AHEAD = 16 << 20


@dataclass(frozen=True)
class Together:
    """One step of all learners: `tokens` rows of which `scored` are predicted, in `sequences` that attention lays out in a
    rectangle `longest` wide. `whole`: the rows are that rectangle.
    """

    tokens: int
    scored: int
    sequences: int
    longest: int
    whole: bool

    @property
    def cells(self) -> int:
        """Of the rectangle."""
        return self.sequences * self.longest


def as_they_are(rows: Sequence[Sequence[Rows]], learners: int, settings: DPO) -> list[Together]:
    """The first steps of `learners`, in order, without a padded row."""
    known = [list(one) for one in rows[:learners]]
    found = []
    for number in range(min(STEPS, settings.steps, *(len(own) for own in known))):
        every = [known[learner % len(known)][number] for learner in range(learners)]
        longest = max(one.width for one in every)
        whole = all(one.padding == 0 and one.width == longest for one in every)
        sequences = sum(one.sequences for one in every)
        scored = sum(one.scored for one in every)
        found.append(Together(sum(one.real for one in every), scored, sequences, longest, whole))
    return found


def together(rows: Sequence[Sequence[Rows]], learners: int, settings: DPO) -> Together:
    """The largest step of `learners`, given the batches of some of them (`data`): the longest rows that any of these has,
    which all are padded to, and as many scored as in that of their steps that has most.
    """
    known = [list(one) for one in rows[:learners]]
    every = [one for own in known for one in own]
    steps = min(STEPS, settings.steps, *(len(own) for own in known))
    scored = max(sum(own[number].scored for own in known) for number in range(steps))
    own = Extent(
        max(one.real for one in every),
        max(one.width for one in every),
        -(-scored * learners // len(known)),
    )
    whole = all(one.padding == 0 and one.width == own.longest for one in every)
    sequences = every[0].sequences
    # With few steps the largest is known before the first, and no shape is rounded up beyond it (`packed.pack`).
    early = settings.loss == "dpo" and (settings.reference == "precomputed" or settings.held_to == "start")
    ahead = early or learners * 2 * settings.batch * settings.max_length * settings.steps * 8 <= AHEAD
    found = rounded_up(own, own if ahead else None, whole)
    tokens = found.each * learners
    return Together(tokens, min(found.scored, tokens), sequences * learners, found.longest, whole)
