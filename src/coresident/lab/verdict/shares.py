"""`status`: how often an arm's cells end with an outcome, counted over repetitions."""

from __future__ import annotations

import math
from dataclasses import replace

from coresident.lab.study.schema import StatusBound
from coresident.lab.verdict import evidence as seen
from coresident.lab.verdict import intervals, procedure, words
from coresident.lab.verdict.claims import Point
from coresident.lab.verdict.evidence import ByCell
from coresident.lab.verdict.model import Finding, State


def share(bound: StatusBound, point: Point, records: ByCell) -> Finding:
    """Judge the share of the cell's outcomes (ok, oom, nonfinite, timeout) that are the one expected.

    Attempts that failed, were interrupted or are invalid say nothing of what the cell does and are not
    counted.
    """
    evidence = seen.outcomes(records, point.arm[0])
    limits = (
        -math.inf if bound.at_least is None else bound.at_least,
        math.inf if bound.at_most is None else bound.at_most,
    )
    ended = [block[0].status for block in evidence.blocks]
    finding = Finding(
        at=point.at,
        state=State.UNDECIDED,
        why="",
        pairs=len(ended),
        needed=intervals.FEWEST,
        limits=limits,
        conditions=evidence.conditions,
        set_aside=evidence.set_aside,
    )
    blocked = seen.obstacle(evidence, "outcome")
    if blocked is not None:
        state, why = blocked
        return replace(finding, state=state, why=why)
    hits = ended.count(bound.is_)
    found = intervals.rate(hits, len(ended))
    assert found is not None
    state = procedure.decide(found, limits)
    _, ends = words.interval(found.estimate, found.low, found.high, limits)
    why = f"{hits} of {len(ended)} ended {bound.is_}; {words.position(state, ends, limits)}"
    return replace(finding, state=state, why=why, estimate=found.estimate, low=found.low, high=found.high)
