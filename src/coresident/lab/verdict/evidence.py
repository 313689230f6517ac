"""Which records a comparison rests on, and why there are no more of them.

`records.generations.counting` decides which blocks count; here they are laid out for the statistics, with
what was set aside and what stands in the way: cells not run, controls that failed, outcomes without a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coresident.lab.records.generations import counting
from coresident.lab.records.schema import OUTCOMES, Record
from coresident.lab.study.cells import Cell
from coresident.lab.verdict import words
from coresident.lab.verdict.intervals import FEWEST
from coresident.lab.verdict.model import SetAside, State

# Records by their cell's hash: over thousands of them, a verdict looks at each only where it matters.
ByCell = Mapping[str, Sequence[Record]]


@dataclass(frozen=True)
class Evidence:
    """What there is about some cells.

    `blocks` holds, for each block that counts, one record a cell, in the order of `cells`; all share
    `conditions`. `seen` are all records of the cells under those conditions, whatever their status.
    """

    cells: tuple[Cell, ...]
    blocks: tuple[tuple[Record, ...], ...]
    conditions: str | None
    seen: tuple[Record, ...]
    set_aside: tuple[SetAside, ...]


def by_cell(records: Iterable[Record]) -> ByCell:
    """Records grouped by their cell's hash."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.cell.hash, []).append(record)
    return found


def gather(records: ByCell, cells: Sequence[Cell]) -> Evidence:
    """The blocks in which each of `cells` has a usable record, newest conditions only."""
    blocks = counting(_of(records, cells), *cells)
    return _evidence(records, cells, [tuple(block) for block in blocks])


def outcomes(records: ByCell, cell: Cell) -> Evidence:
    """The cell's outcome in each repetition (its newest record that is one): blocks of a single record."""
    ended = [record for record in _of(records, [cell]) if record.status in OUTCOMES]
    if not ended:
        return _evidence(records, [cell], [])
    newest = max(ended, key=_age).conditions.hash
    by_repetition: dict[int, Record] = {}
    for record in sorted(ended, key=_age):
        if record.conditions.hash == newest:
            by_repetition[record.block.repetition] = record
    return _evidence(records, [cell], [(by_repetition[repetition],) for repetition in sorted(by_repetition)])


def obstacle(evidence: Evidence, noun: str) -> tuple[State, str] | None:
    """Why too few blocks count to decide: the state that follows and the reason; None where there are enough.

    `noun` names what is counted ("pair" for two arms, "block" for one).
    """
    have = len(evidence.blocks)
    if have >= FEWEST:
        return None
    failed = failed_controls(evidence)
    if failed:
        return State.INVALID, f"{failed}, which leaves {words.count(have, noun)} of the {FEWEST} needed"
    ran = {record.cell.hash for record in evidence.seen if record.status != "interrupted"}
    waiting = [cell.id for cell in evidence.cells if cell.hash not in ran]
    if waiting:
        still = " under the newest conditions" if evidence.set_aside else ""
        return State.PENDING, f"not measured yet{still}: {words.listed(waiting)}"
    return State.UNDECIDED, f"{words.count(have, noun)} of the {FEWEST} needed{_losses(evidence)}"


def failed_controls(evidence: Evidence) -> str:
    """The controls that keep a repetition from counting: "" where none does.

    A repetition counts as spoilt where, in its newest generation, some cell's only results failed a control.
    """
    spoilt: dict[str, set[int]] = {}
    counted = {block[0].block.repetition for block in evidence.blocks}
    for repetition in {record.block.repetition for record in evidence.seen} - counted:
        tried = [record for record in evidence.seen if record.block.repetition == repetition]
        newest = max(record.block.generation for record in tried)
        for cell in evidence.cells:
            mine = [r for r in tried if r.cell.hash == cell.hash and r.block.generation == newest]
            if not any(record.status in OUTCOMES for record in mine):
                for record in mine:
                    if record.status == "invalid":
                        spoilt.setdefault(_control(record), set()).add(repetition)
    return "; ".join(f"{what} in {_blocks(where)}" for what, where in sorted(spoilt.items()))


def _control(record: Record) -> str:
    failed = [(name, control) for name, control in record.controls.items() if control.state == "failed"]
    if not failed:
        return f"{record.cell.arm} is invalid ({record.reason or 'no reason given'})"
    name, control = failed[0]
    said = control.reason or f"asked {control.asked}, ran {control.ran}"
    return f"control {name!r} of {record.cell.arm} failed ({said})"


def _losses(evidence: Evidence) -> str:
    """What the repetitions that do not count ended in: " (fork: 2 oom; native: 1 failed)"."""
    counted = {block[0].block.repetition for block in evidence.blocks}
    lost: dict[str, Counter[str]] = {}
    for cell in evidence.cells:
        last: dict[int, Record] = {}
        for record in evidence.seen:
            if record.cell.hash == cell.hash and record.block.repetition not in counted:
                last[record.block.repetition] = record
        statuses = Counter(record.status for record in last.values() if record.status != "ok")
        if statuses:
            lost.setdefault(cell.arm, Counter()).update(statuses)
    if not lost:
        return ""
    told = (f"{arm}: {', '.join(f'{n} {status}' for status, n in c.items())}" for arm, c in lost.items())
    return f" ({'; '.join(told)})"


def _blocks(repetitions: Iterable[int]) -> str:
    numbers = [str(repetition + 1) for repetition in sorted(repetitions)]
    return f"block{'s' if len(numbers) > 1 else ''} {words.listed(numbers, most=9)}"


def _evidence(records: ByCell, cells: Sequence[Cell], blocks: Sequence[tuple[Record, ...]]) -> Evidence:
    mine = sorted(_of(records, cells), key=_age)
    if not mine:
        return Evidence(tuple(cells), (), None, (), ())
    counted = max((record for block in blocks for record in block), key=_age, default=mine[-1])
    newest = counted.conditions
    others: dict[str, list[Record]] = {}
    for record in mine:
        if record.conditions.hash != newest.hash and record.status in OUTCOMES:
            others.setdefault(record.conditions.hash, []).append(record)
    return Evidence(
        cells=tuple(cells),
        blocks=tuple(sorted(blocks, key=lambda block: block[0].block.repetition)),
        conditions=newest.hash,
        seen=tuple(record for record in mine if record.conditions.hash == newest.hash),
        set_aside=tuple(
            SetAside(
                conditions=hash_,
                newest=newest.hash,
                records=tuple(record.id for record in older),
                differing=differing(older[-1].conditions.values, newest.values),
            )
            for hash_, older in others.items()
            # Newer conditions count once a block is complete under them: those records are not set aside.
            if _age(older[-1]) < _age(counted)
        ),
    )


def differing(then: Mapping[str, str], now: Mapping[str, str]) -> tuple[tuple[str, str, str], ...]:
    """The conditions that are not the same: (key, value then, value now), "" where absent."""
    keys = sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key))
    return tuple((key, then.get(key, ""), now.get(key, "")) for key in keys)


def _of(records: ByCell, cells: Sequence[Cell]) -> list[Record]:
    return [record for cell in cells for record in records.get(cell.hash, ())]


def _age(record: Record) -> tuple[str, int, int]:
    """What orders records in time. Generations and attempts settle records of one second."""
    return record.started, record.block.generation, record.attempt
