"""Triton kernels of a cache that the host takes no part in: `admit` decides what a step of one layer evicts, `fetch` brings it.

`admit` is `cache.Cache.step` and `policies` in one program, decision by decision, with priorities in float64 as on the host.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def admit(
    chosen, slots, priority, steps, factor, free, left, counts, fills, filled, awake, pairs, experts,
    RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One layer's step over the experts in chosen [pairs]: its row of the map, `slots` [E], and its books are brought up to date,
    and each (expert, slot) to be filled is listed in `fills` [C, 2], `filled` of them.

    RULE 0: the priority is the step at which an expert was last chosen; 1: how often it was, times `factor` a step; 2: it stays.
    While `awake` is 0 nothing is chosen and nothing counted.
    """
    at = tl.arange(0, BLOCK)
    inside = at < experts
    live = tl.load(awake)
    needed = at < 0
    for pair in range(pairs * live):
        needed = needed | (at == tl.load(chosen + pair))
    slot = tl.load(slots + at, mask=inside, other=-1)
    missing = needed & (slot < 0)
    accesses = tl.sum(tl.where(needed, 1, 0), 0)
    misses = tl.sum(tl.where(missing, 1, 0), 0)
    rank = tl.load(priority + at, mask=inside, other=0.0)
    if RULE == 0:
        now = tl.load(steps) + live.to(tl.float64)
        tl.store(steps, now)
        rank = tl.where(needed, now, rank)
    elif RULE == 1:
        rank = tl.where(live > 0, rank * tl.load(factor), rank)
        rank = tl.where(needed, rank + 1.0, rank)
    tl.store(priority + at, rank, mask=inside)
    spare = tl.load(left)
    for number in range(misses):
        expert = tl.min(tl.where(missing, at, BLOCK), 0)
        # Who may go: whoever is here and not needed now; those that were filled before are needed.
        may_go = tl.where(needed, 0, tl.where(slot >= 0, 1, 0)) > 0
        lowest = tl.min(tl.where(may_go, rank, float("inf")), 0)
        victim = tl.min(tl.where(may_go & (rank == lowest), at, BLOCK), 0)
        room = spare > 0
        place = tl.where(
            room, tl.load(free + tl.maximum(spare - 1, 0)), tl.sum(tl.where(at == victim, slot, 0), 0)
        )
        slot = tl.where((at == victim) & (spare <= 0), -1, slot)
        slot = tl.where(at == expert, place, slot)
        spare = tl.where(room, spare - 1, spare)
        missing = missing & (at != expert)
        tl.store(fills + 2 * number, expert)
        tl.store(fills + 2 * number + 1, place)
    tl.store(slots + at, slot, mask=inside)
    tl.store(left, spare)
    tl.store(filled, misses)
    tl.store(counts, tl.load(counts) + live)
    tl.store(counts + 1, tl.load(counts + 1) + tl.where(misses == 0, live, 0))
    tl.store(counts + 2, tl.load(counts + 2) + accesses)
    tl.store(counts + 3, tl.load(counts + 3) + accesses - misses)


@triton.jit
def fetch(records, arena, fills, filled, first, words, BLOCK: tl.constexpr):
    """arena[slot] = records[first + expert] for each of `filled` (expert, slot) in `fills`: rows of `words` int32, read from
    pinned host memory across the bus. Programs take the pieces of all records in turn.
    """
    pieces = tl.cdiv(words, BLOCK)
    for piece in range(tl.program_id(0), tl.load(filled) * pieces, tl.num_programs(0)):
        which = piece // pieces
        expert = tl.load(fills + 2 * which).to(tl.int64)
        slot = tl.load(fills + 2 * which + 1).to(tl.int64)
        word = (piece % pieces) * BLOCK + tl.arange(0, BLOCK)
        inside = word < words
        found = tl.load(records + (first + expert) * words + word, mask=inside)
        tl.store(arena + slot * words + word, found, mask=inside)
