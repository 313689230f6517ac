"""Which generation of a block is open and what it lacks, and which generation counts: decided from records
only.

A block is one repetition of cells that are compared. Its members are measured close together; when one of
them fails, when conditions change, when an arm joins, or when a member is taken away again, the block is
measured anew as a whole: that is its next generation. Members of different generations are never paired.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coresident.lab.records.schema import OUTCOMES, Conditions, Record
from coresident.lab.study.cells import Cell

_CHANGED = "conditions changed"
FAILURES: frozenset[str] = frozenset({"failed", "invalid"})


@dataclass(frozen=True)
class BlockState:
    """What is to be measured next in a block.

    `missing` are the ids of the cells that generation `generation` still lacks. `closed`: nothing is
    missing, because the block is complete or because a member used up its attempts. `why` says what led
    here, "" while nothing happened yet. `then` are the conditions that changed, and `used_up` the cells
    that failed as often as they may.
    """

    generation: int
    missing: tuple[str, ...]
    closed: bool
    why: str
    then: Conditions | None = None
    used_up: tuple[str, ...] = ()


def state(
    group_cells: Sequence[str],
    records: Iterable[Record],
    conditions_hash: str,
    repetition: int,
    attempts: int,
    gone: Iterable[Record] = (),
) -> BlockState:
    """The open generation of the block that is repetition `repetition` of `group_cells` (cell ids).

    `records` are those that count (not retracted). `gone` are those that were there and count no more: the
    retracted ones, and with `--retry` those that shall be measured again; they cost no attempt, but a
    generation that lost one is over. `attempts` is how often a cell may fail in one repetition under the
    same conditions.

    The next generation opens if in the newest one a member is gone, ran under other conditions, was not yet
    planned, or failed with attempts left. Where a failed member has none left, the others are measured to
    the end and the block is closed. `interrupted`, or no record, is missing. `oom`, `nonfinite` and
    `timeout` are outcomes and are not repeated.
    """
    block = [record for record in records if _of_block(record, group_cells, repetition)]
    lost = [record for record in gone if _of_block(record, group_cells, repetition)]
    everyone = tuple(group_cells)
    if not block and not lost:
        return BlockState(0, everyone, closed=not everyone, why="")
    newest = max(record.block.generation for record in (*block, *lost))
    last = _latest(record for record in block if record.block.generation == newest)
    over = _over(group_cells, last, [r for r in lost if r.block.generation == newest], conditions_hash)
    if over:
        others = [r.conditions for r in last.values() if r.conditions.hash != conditions_hash]
        return BlockState(newest + 1, everyone, False, over, others[0] if over == _CHANGED else None)

    failed = [cell for cell in group_cells if cell in last and last[cell].status in FAILURES]
    failures = {cell: _failures(block, cell, conditions_hash) for cell in failed}
    if failed and all(failures[cell] < attempts for cell in failed):
        return BlockState(newest + 1, everyone, closed=False, why=f"{failed[0]} {last[failed[0]].status}")
    missing = tuple(cell for cell in group_cells if cell not in last or last[cell].status == "interrupted")
    used_up = [cell for cell in failed if failures[cell] >= attempts]
    if used_up:
        why = f"{used_up[0]} used up its attempts ({failures[used_up[0]]} of {attempts})"
    else:
        why = f"{len(missing)} of {len(everyone)} missing" if missing else "complete"
    return BlockState(newest, missing, closed=not missing, why=why, used_up=tuple(used_up))


def counting(records: Iterable[Record], *cells: Cell | None) -> list[tuple[Record, ...]]:
    """The records that count for `cells` together: one tuple a repetition, in the order of `cells` and of
    repetitions.

    For each repetition it is the newest generation in which each cell ended in an outcome, all under one
    conditions hash; it gives a tuple if all of them are ok. All tuples share the conditions of the newest.
    `None` among the cells is left out. Cells are told apart by their hash, so that no two that were asked
    different things are ever pooled.
    """
    named = [cell for cell in cells if cell is not None]
    hashes = {cell.hash for cell in named}
    ids = {cell.id for cell in named}
    blocks: dict[int, dict[int, list[Record]]] = {}
    for record in records:
        # Who was not planned together was not measured together, whatever the generation's number.
        if record.cell.hash in hashes and ids <= set(record.block.members):
            generations = blocks.setdefault(record.block.repetition, {})
            generations.setdefault(record.block.generation, []).append(record)
    found = [
        one for _, block in sorted(blocks.items()) if (one := _newest_complete(block, named)) is not None
    ]
    whole = [block for block in found if all(record.status == "ok" for record in block)]
    if not found:
        return []
    newest = max(found, key=_age)[0].conditions.hash
    return [block for block in whole if block[0].conditions.hash == newest]


def _newest_complete(
    block: Mapping[int, Sequence[Record]], cells: Sequence[Cell]
) -> tuple[Record, ...] | None:
    for generation in sorted(block, reverse=True):
        last = _latest(block[generation])
        members = tuple(last[cell.id] for cell in cells if cell.id in last)
        complete = len(members) == len(cells) and all(record.status in OUTCOMES for record in members)
        if complete and len({record.conditions.hash for record in members}) == 1:
            return members
    return None


def _over(group: Sequence[str], last: Mapping[str, Record], lost: Sequence[Record], conditions: str) -> str:
    """Why the newest generation takes no more members, "" if it does."""
    for record in lost:
        if record.status != "interrupted":
            return f"{record.id} counts no more"
    for record in last.values():
        if record.conditions.hash != conditions:
            return _CHANGED
    for record in (*last.values(), *lost):
        new = [cell for cell in group if cell not in record.block.members]
        if new:
            return f"{new[0]} was added"
    return ""


def _failures(block: Iterable[Record], cell: str, conditions: str) -> int:
    # A failure under other conditions says nothing about these: mending what failed is such a change.
    return sum(
        record.cell.id == cell and record.status in FAILURES and record.conditions.hash == conditions
        for record in block
    )


def _latest(records: Iterable[Record]) -> dict[str, Record]:
    """Each cell's record of the highest attempt."""
    return {record.cell.id: record for record in sorted(records, key=lambda record: record.attempt)}


def _of_block(record: Record, cells: Sequence[str], repetition: int) -> bool:
    return record.block.repetition == repetition and record.cell.id in cells


def _age(block: Sequence[Record]) -> tuple[str, int]:
    """What orders blocks in time: their last start (UTC, ISO 8601), then their generation."""
    return max(record.started for record in block), block[0].block.generation
