"""A comparison's number: each block's metric made into a ratio, a value or a slope, with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coresident.lab.records.schema import Record
from coresident.lab.study.schema import Hypothesis, Study
from coresident.lab.verdict import evidence as seen
from coresident.lab.verdict import procedure, words
from coresident.lab.verdict.claims import Point
from coresident.lab.verdict.evidence import Evidence
from coresident.lab.verdict.intervals import FEWEST, Interval
from coresident.lab.verdict.model import State


@dataclass(frozen=True)
class Measured:
    """`found` is None where nothing can be said: then `state` and `trouble` say what and why.

    `blocks` counts those that entered; `trouble` beside a found interval is what a reader should know all the
    same.
    """

    found: Interval | None
    blocks: int
    unit: str = ""
    state: State = State.UNDECIDED
    trouble: str = ""
    needed: int = FEWEST


def measure(study: Study, hypothesis: Hypothesis, point: Point, evidence: Evidence) -> Measured:
    """The interval of a ratio (a number), of a difference or a value (in the metric's unit), or of slopes (per
    unit of the factor).

    `evidence` is of the point's arm cells followed by its `to` cells; intervals include the study's noise
    floor.
    """
    metric = hypothesis.metric
    assert metric is not None
    noun = "pair" if point.to else "block"
    usable = [block for block in evidence.blocks if all(metric in record.metrics for record in block)]
    without = len(evidence.blocks) - len(usable)
    units = sorted({_unit(record, metric) for block in usable for record in block})
    if len(units) > 1:
        return Measured(None, len(usable), trouble=f"{metric} was reported in {' and in '.join(units)}")
    unit = _unit_of(hypothesis, units, usable)
    blocked = seen.obstacle(evidence, noun)
    if blocked is not None:
        return Measured(None, len(usable), unit, *blocked)
    if len(usable) < FEWEST:
        why = _withheld(evidence.blocks, metric)
        lacking = f"{words.count(len(usable), noun)} of the {FEWEST} needed ({without} lack {metric}{why})"
        return Measured(None, len(usable), unit, trouble=lacking)
    left_out = seen.failed_controls(evidence)
    trouble = f"left out: {left_out}" if left_out else ""
    if without:
        trouble = "; ".join(
            filter(None, [trouble, f"{words.count(without, noun)} without {metric} left out"])
        )
    sides = [_side(point, block, metric) for block in usable]
    if not point.to:
        found = procedure.value([arm for arm, _ in sides], study.noise_floor)
    elif hypothesis.expect.difference is not None:
        found = procedure.value([arm - to for arm, to in sides], study.noise_floor)
    else:
        if any(arm <= 0 or to <= 0 for arm, to in sides):
            what = f"the slope of {metric}" if point.levels else metric
            return Measured(
                None, len(usable), unit, trouble=f"{what} is not positive in every block, so it has no ratio"
            )
        found = procedure.ratio(sides, study.noise_floor)
    if found is None:
        return Measured(None, len(usable), unit, trouble=f"{metric} is too large to compute with")
    return Measured(found, len(usable), unit, trouble=trouble)


def _withheld(blocks: Sequence[Sequence[Record]], metric: str) -> str:
    """Why telemetry gives no number, ": " before it; "" where it says nothing."""
    key = f"{metric.removesuffix('_mib').removesuffix('_joules')}_reason"
    lacking = [record for block in blocks for record in block if metric not in record.metrics]
    return next((f": {record.telemetry[key]}" for record in lacking if key in record.telemetry), "")


def _side(point: Point, block: Sequence[Record], metric: str) -> tuple[float, float]:
    """The arm's number in one block and that of what it is compared to, 0 where there is none."""
    values = [record.metrics[metric].value for record in block]
    arm, to = values[: len(point.arm)], values[len(point.arm) :]
    if point.levels:
        return procedure.slope(point.levels, arm), procedure.slope(point.levels, to) if to else 0.0
    return arm[0], to[0] if to else 0.0


def _unit(record: Record, metric: str) -> str:
    """A metric's unit and scope: a session's number and a whole training's are not of one kind."""
    reported = record.metrics[metric]
    return reported.unit if reported.scope == "session" else f"{reported.unit} ({reported.scope})"


def _unit_of(hypothesis: Hypothesis, units: Sequence[str], usable: Sequence[Sequence[Record]]) -> str:
    if hypothesis.expect.ratio is not None or not usable:
        return ""
    return f"{units[0]}/{hypothesis.compare.slope}" if hypothesis.compare.slope is not None else units[0]
