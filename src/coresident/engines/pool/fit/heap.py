"""PyTorch's caching allocator, as far as it decides how much of a card a process takes: what it is asked for, in which
order, gives what it reserves, rounding and fragmentation included.

Rules of CUDACachingAllocator (PyTorch, c10/cuda/CUDACachingAllocator.cpp), with its default settings and one stream:
sizes are rounded up to 512 bytes; up to 1 MiB they come from segments of 2 MiB, below 10 MiB from segments of 20 MiB,
beyond that from a segment of their own, rounded up to 2 MiB; the smallest free block that is large enough is taken, and
split where more than 512 bytes (of small segments) or 1 MiB (of large ones) are left; a freed block joins its free
neighbours; segments are never given back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field

KIB, MIB = 1 << 10, 1 << 20
ROUND = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
LARGE, LARGE_SEGMENT = 10 * MIB, 20 * MIB


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment; `before` and `after` are its neighbours there. `kind` says what lies in it."""

    address: int
    size: int
    small: bool
    free: bool = True
    kind: str = ""
    asked: int = 0
    before: Block | None = None
    after: Block | None = None


@dataclass
class Heap:
    """One process's. `reserved` are bytes of the card; `held` bytes asked for and not given back, by kind; `fullest` is
    what was held when that was most.
    """

    reserved: int = 0
    held: Counter[str] = field(default_factory=Counter)
    fullest: Counter[str] = field(default_factory=Counter)
    _total: int = 0
    _most: int = 0
    _end: int = 0
    _free: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    _blocks: dict[int, Block] = field(default_factory=dict)

    def take(self, size: float, kind: str) -> Block:
        """Ask for `size` bytes."""
        asked = max(-(-int(size) // ROUND) * ROUND, ROUND)
        small = asked <= SMALL
        free = self._free[small]
        place = bisect_left(free, (asked, -1))
        block = self._blocks[free.pop(place)[1]] if place < len(free) else self._segment(asked, small)
        left = block.size - asked
        if left >= ROUND if small else left > SMALL:
            rest = Block(block.address + asked, left, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, asked
            self._blocks[rest.address] = rest
            self._put(rest)
        block.free, block.kind, block.asked = False, kind, asked
        self.held[kind] += asked
        self._total += asked
        if self._total > self._most:
            self._most, self.fullest = self._total, Counter(self.held)
        return block

    def give(self, *blocks: Block) -> None:
        """Give back."""
        for block in blocks:
            self.held[block.kind] -= block.asked
            self._total -= block.asked
            block.free = True
            for other in (block.before, block.after):
                if other is not None and other.free:
                    self._forget(other)
            if block.after is not None and block.after.free:
                block.size += block.after.size
                del self._blocks[block.after.address]
                block.after = block.after.after
            if block.before is not None and block.before.free:
                # The earlier one goes on, so that whoever points at it still does.
                block.before.size += block.size
                block.before.after = block.after
                del self._blocks[block.address]
                block = block.before
            if block.after is not None:
                block.after.before = block
            self._put(block)

    def _segment(self, asked: int, small: bool) -> Block:
        if small:
            size = SMALL_SEGMENT
        elif asked < LARGE:
            size = LARGE_SEGMENT
        else:
            size = -(-asked // SMALL_SEGMENT) * SMALL_SEGMENT
        self.reserved += size
        self._end += size
        block = self._blocks[self._end - size] = Block(self._end - size, size, small)
        return block

    def _put(self, block: Block) -> None:
        insort(self._free[block.small], (block.size, block.address))

    def _forget(self, block: Block) -> None:
        free = self._free[block.small]
        free.pop(bisect_left(free, (block.size, block.address)))
