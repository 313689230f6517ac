"""`same`: whether two arms did the same, bit for bit. One difference in one block refutes it."""

from __future__ import annotations

from dataclasses import replace

from coresident.lab.records.schema import Record
from coresident.lab.verdict import evidence as seen
from coresident.lab.verdict import words
from coresident.lab.verdict.claims import Point
from coresident.lab.verdict.evidence import Evidence
from coresident.lab.verdict.intervals import FEWEST
from coresident.lab.verdict.model import Finding, State


def sameness(point: Point, evidence: Evidence) -> Finding:
    """Compare, within each block, all series digests and all digests of the two cells by name.

    Refuted by the first difference, a name that only one arm reports included. Where a cell reports neither
    series nor digests there is nothing to compare, which supports nothing. Supported only from three blocks
    on.
    """
    finding = Finding(
        at=point.at,
        state=State.UNDECIDED,
        why="",
        pairs=len(evidence.blocks),
        needed=FEWEST,
        conditions=evidence.conditions,
        set_aside=evidence.set_aside,
    )
    silent = ""
    for arm, to in evidence.blocks:
        block = f"block {arm.block.repetition + 1}"
        empty = [record.cell.arm for record in (arm, to) if not record.series and not record.digests]
        if empty:
            arms = " and ".join(empty)
            silent = silent or f"{arms} reported no series and no digest in {block}: nothing to compare"
            continue
        difference = _difference(arm, to)
        if difference:
            return replace(finding, state=State.REFUTED, why=f"{difference} in {block}")
    if silent:
        return replace(finding, why=silent)
    blocked = seen.obstacle(evidence, "pair")
    if blocked is not None:
        state, why = blocked
        return replace(finding, state=state, why=why)
    series = max(len(arm.series) for arm, _ in evidence.blocks)
    digests = max(len(arm.digests) for arm, _ in evidence.blocks)
    compared = f"{words.count(series, 'series', 'series')} and {words.count(digests, 'digest')}"
    why = f"{compared} equal in each of {len(evidence.blocks)} blocks"
    return replace(finding, state=State.SUPPORTED, why=why)


def _difference(arm: Record, to: Record) -> str:
    """The first thing, by name, in which two records of a block differ; "" where they are the same."""
    kinds = (
        ("series", _series(arm), _series(to)),
        ("digest", dict(arm.digests), dict(to.digests)),
    )
    for kind, ours, theirs in kinds:
        for name in sorted(ours.keys() | theirs.keys()):
            if name not in ours or name not in theirs:
                only = arm.cell.arm if name in ours else to.cell.arm
                return f"{kind} {name!r} was reported by {only} alone"
            if ours[name] != theirs[name]:
                where = _where(name, arm, to) if kind == "series" else ""
                return f"{kind} {name!r} of {arm.cell.arm} differs from that of {to.cell.arm}{where}"
    return ""


def _series(record: Record) -> dict[str, str]:
    return {name: f"{series.length}:{series.digest}" for name, series in record.series.items()}


def _where(name: str, arm: Record, to: Record) -> str:
    """At which element two series part, as far as their values were kept."""
    ours, theirs = arm.series[name], to.series[name]
    lengths = "" if ours.length == theirs.length else f" (length {ours.length} against {theirs.length})"
    for index, (one, other) in enumerate(zip(ours.values, theirs.values, strict=False)):
        if one != other:
            return f"{lengths} from element {index} on ({one!r} against {other!r})"
    return lengths
