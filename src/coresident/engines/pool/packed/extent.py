"""How large a step's rows are, and which few sizes they are rounded up to. Needs no torch: what a pack will take of a card
is foretold with it too.
"""

from __future__ import annotations

from dataclasses import dataclass

_EIGHTHS = 8


@dataclass(frozen=True)
class Extent:
    """How large a step's rows are: rows of the learner that has most (`each`), the longest sequence, and scored rows."""

    each: int
    longest: int
    scored: int

    def over(self, other: Extent) -> Extent:
        """One that both fit into."""
        return Extent(
            max(self.each, other.each), max(self.longest, other.longest), max(self.scored, other.scored)
        )


def rounded_up(own: Extent, most: Extent | None, whole: bool) -> Extent:
    """What rows of this extent are padded to: as large as the largest step, where that is known and not much more than they
    are; else each size to eighths of a power of two. `whole`: every learner has as many rows, none of them padding.
    """
    if most is not None and most.each * _EIGHTHS <= own.each * (_EIGHTHS + 2):
        return most.over(own)
    if whole:
        return Extent(own.each, own.longest, _up(own.scored))
    return Extent(_up(own.each), _up(own.longest), _up(own.scored))


def _up(count: int) -> int:
    multiple = max(_EIGHTHS, (1 << count.bit_length() - 1) // _EIGHTHS)
    return -(-count // multiple) * multiple
