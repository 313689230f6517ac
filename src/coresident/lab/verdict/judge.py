"""From records to a verdict, and to the comparisons that are still too wide to stop measuring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from coresident.lab.records.schema import OUTCOMES, Record, Retraction
from coresident.lab.study.cells import Cell
from coresident.lab.study.schema import Hypothesis, Study
from coresident.lab.verdict import claims, model, procedure, unpassed, words
from coresident.lab.verdict.claims import Point
from coresident.lab.verdict.evidence import ByCell, by_cell, gather
from coresident.lab.verdict.measured import measure
from coresident.lab.verdict.model import (
    Blocks,
    Finding,
    Judged,
    SetAside,
    State,
    Verdict,
    Withdrawn,
    exit_status,
)
from coresident.lab.verdict.sameness import sameness
from coresident.lab.verdict.shares import share

__all__ = ["exit_status", "judge", "wide"]


def judge(
    study: Study,
    cells: Sequence[Cell],
    records: Sequence[Record],
    post_hoc: Collection[str] = (),
    retracted: Sequence[tuple[Record, Retraction]] = (),
) -> Verdict:
    """The verdict on `study` from its `cells` and the records that are not retracted.

    `post_hoc` names the hypotheses that were stated or changed after data. `retracted` are the records that
    were taken out: they decide nothing, but a reader must know that there were any, and which hypotheses
    they were about. Raises `UserError` for a slope over a factor without two numbers.
    """
    found = by_cell(records)
    gone = {record.cell.hash for record, _ in retracted}
    judged = tuple(
        _hypothesis(study, name, hypothesis, cells, found, name in post_hoc, gone)
        for name, hypothesis in study.hypotheses.items()
    )
    findings = [finding for one in judged for finding in one.findings]
    needed, done = study.repetitions.min, _blocks(cells, found)
    return Verdict(
        study=study.study,
        question=study.question,
        state=model.first_of((one.state for one in judged), model.STUDY_PRECEDENCE) if judged else None,
        hypotheses=judged,
        measured=sum(min(needed, len(gather(found, [cell]).blocks)) for cell in cells),
        planned=needed * len(cells),
        conditions=tuple(dict.fromkeys(f.conditions for f in findings if f.conditions is not None)),
        set_aside=_merged(aside for finding in findings for aside in finding.set_aside),
        blocks=Blocks(len(done), needed, study.repetitions.limit),
        statuses=Counter(record.status for record in records),
        retracted=tuple(Withdrawn(one.record, one.reason, one.date) for _, one in retracted),
        controls=unpassed.of(records),
        wide=_still_wide(study, cells, records, done),
    )


def wide(study: Study, cells: Sequence[Cell], records: Sequence[Record]) -> list[str]:
    """The comparisons (ratios, values, slopes) that are not yet within `until.half_width`; empty is enough.

    Only widths are looked at, never limits or states: to stop when a claim looks decided would bias what is
    decided. Without `until` no width is ever enough.
    """
    until = study.repetitions.until
    names = []
    indexed = by_cell(records)
    for name, hypothesis in study.hypotheses.items():
        if hypothesis.expect.bound is None:
            continue
        for point in claims.points(name, hypothesis, cells):
            evidence = gather(indexed, [*point.arm, *point.to])
            found = measure(study, hypothesis, point, evidence).found
            without_newest = replace(evidence, blocks=evidence.blocks[:-1])
            before = measure(study, hypothesis, point, without_newest).found
            if until is None or not procedure.narrow(found, before, until.half_width):
                names.append(f"{name} ({words.levels(point.at)})" if point.at else name)
    return names


def _still_wide(
    study: Study, cells: Sequence[Cell], records: Sequence[Record], done: Collection[int]
) -> tuple[str, ...]:
    """What is `wide` over the repetitions `done`, where that is what a run goes on for."""
    if study.repetitions.until is None or len(done) < study.repetitions.min:
        return ()
    return tuple(wide(study, cells, [record for record in records if record.block.repetition in done]))


def _blocks(cells: Sequence[Cell], records: ByCell) -> set[int]:
    """The repetitions in which every cell has an outcome."""
    each = [
        {one.block.repetition for one in records.get(cell.hash, ()) if one.status in OUTCOMES}
        for cell in cells
    ]
    return set.intersection(*each) if each else set()


def _hypothesis(
    study: Study,
    name: str,
    hypothesis: Hypothesis,
    cells: Sequence[Cell],
    records: ByCell,
    post_hoc: bool,
    gone: Collection[str],
) -> Judged:
    points = claims.points(name, hypothesis, cells)
    findings = tuple(_finding(study, hypothesis, point, records) for point in points)
    state = model.first_of((finding.state for finding in findings), model.HYPOTHESIS_PRECEDENCE)
    return Judged(
        name=name,
        claim=hypothesis.claim,
        about=claims.about(hypothesis),
        state=state,
        post_hoc=post_hoc,
        findings=findings,
        why=_why(state, findings),
        after_retraction=any(cell.hash in gone for point in points for cell in (*point.arm, *point.to)),
    )


def _finding(study: Study, hypothesis: Hypothesis, point: Point, records: ByCell) -> Finding:
    if hypothesis.expect.same:
        return sameness(point, gather(records, [*point.arm, *point.to]))
    if hypothesis.expect.status is not None:
        return share(hypothesis.expect.status, point, records)
    bound = hypothesis.expect.bound
    assert bound is not None
    evidence = gather(records, [*point.arm, *point.to])
    measured = measure(study, hypothesis, point, evidence)
    finding = Finding(
        at=point.at,
        state=State.UNDECIDED,
        why=measured.trouble,
        pairs=measured.blocks,
        needed=measured.needed,
        limits=bound.limits,
        unit=measured.unit,
        conditions=evidence.conditions,
        set_aside=evidence.set_aside,
    )
    found = measured.found
    if found is None:
        return replace(finding, state=measured.state)
    state = procedure.decide(found, bound.limits)
    _, ends = words.interval(found.estimate, found.low, found.high, bound.limits)
    return replace(
        finding,
        state=state,
        why="; ".join(filter(None, [words.position(state, ends, bound.limits), measured.trouble])),
        estimate=found.estimate,
        low=found.low,
        high=found.high,
    )


def _why(state: State, findings: Sequence[Finding]) -> str:
    """One sentence for a hypothesis: the findings that settle its state, and where the others stand."""
    if not findings:
        return "no cell of the study matches it"
    deciding = [finding for finding in findings if finding.state is state]
    if len(findings) == 1:
        return deciding[0].why
    told = words.listed((f"{words.levels(f.at)}: {f.why}" for f in deciding), separator="; ")
    if len(deciding) == len(findings):
        return f"at each of {len(findings)} points; {told}"
    return f"at {len(deciding)} of {len(findings)} points; {told}"


def _merged(asides: Iterable[SetAside]) -> tuple[SetAside, ...]:
    """Each pair of conditions once, with all records that were set aside for it."""
    merged: dict[tuple[str, str], SetAside] = {}
    for aside in asides:
        key = (aside.conditions, aside.newest)
        before = merged.get(key)
        names = dict.fromkeys((*(before.records if before else ()), *aside.records))
        merged[key] = replace(aside, records=tuple(names))
    return tuple(merged.values())
