"""A verdict to be read: on a terminal, in a README, by a program. States are words, never colours alone."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from coresident.lab.report import tables
from coresident.lab.report.tables import Table
from coresident.lab.verdict import words
from coresident.lab.verdict.model import (
    Finding,
    Judged,
    SetAside,
    State,
    Unpassed,
    Verdict,
    Withdrawn,
    exit_status,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

_STYLES = {
    State.SUPPORTED.value: "bold green",
    State.REFUTED.value: "bold red",
    State.UNDECIDED.value: "bold yellow",
    State.PENDING.value: "dim",
    State.INVALID.value: "bold magenta",
}


def terminal(verdict: Verdict, console: Console) -> None:
    """A table of the findings, a sentence a hypothesis, what was not pooled; plain text off a terminal."""
    tables.say(f"{verdict.study}: {_summary(verdict)}", console, style="bold")
    tables.say(verdict.question, console)
    if verdict.hypotheses:
        console.file.write("\n")
        tables.show(_table(verdict, compared=False), console)
        console.file.write("\n")
    for judged in verdict.hypotheses:
        tables.say(_sentence(judged), console)
    for note in _notes(verdict):
        tables.say(note, console)


def markdown(verdict: Verdict) -> str:
    """The same as Markdown, ending in a newline: what README and docs take in."""
    head = tables.escaped(f"{verdict.study}: {_summary(verdict)}")
    lines = [f"**{head}.** {tables.escaped(verdict.question)}"]
    if verdict.hypotheses:
        lines += ["", tables.markdown(_table(verdict, compared=True)), ""]
    lines += [f"- {tables.escaped(_sentence(judged))}" for judged in verdict.hypotheses]
    lines += [f"- {tables.escaped(note)}" for note in _notes(verdict)]
    return "\n".join(lines) + "\n"


def as_json(verdict: Verdict) -> str:
    """The whole verdict as one strict JSON object (an open side of `limits` is null)."""
    told: dict[str, Any] = {
        "schema_version": 1,
        "study": verdict.study,
        "question": verdict.question,
        "state": verdict.state,
        "exit_status": exit_status(verdict),
        "measured": verdict.measured,
        "planned": verdict.planned,
        "blocks": {"measured": verdict.blocks.measured, "needed": verdict.blocks.needed},
        "records": dict(verdict.statuses),
        "stopped": verdict.stopped or None,
        "unfinished": verdict.unfinished,
        "wide": list(verdict.wide),
        "retracted": [asdict(one) for one in verdict.retracted],
        "controls": [asdict(one) for one in verdict.controls],
        "conditions": list(verdict.conditions),
        "hypotheses": {judged.name: _judged_json(judged) for judged in verdict.hypotheses},
        "set_aside": [_aside_json(aside) for aside in verdict.set_aside],
    }
    return json.dumps(told, indent=2, allow_nan=False, ensure_ascii=False)


def _summary(verdict: Verdict) -> str:
    if verdict.state is None:
        return f"no hypotheses; {verdict.measured} of {verdict.planned} measurements done"
    states = [judged.state for judged in verdict.hypotheses]
    told = ", ".join(f"{states.count(state)} {state}" for state in State if state in states)
    return f"{verdict.state} ({told})" if len(set(states)) > 1 else f"{verdict.state}"


def _table(verdict: Verdict, compared: bool) -> Table:
    """A row for each finding. What is `compared` has a column only where there is room for it."""
    rows = []
    for judged in verdict.hypotheses:
        about = [judged.about] if compared else []
        rows += [[_name(judged), *about, *_row(finding)] for finding in judged.findings]
        if not judged.findings:
            rows.append([_name(judged), *about, "", "0", "", "", "", judged.state.value])
    about = ["compared"] if compared else []
    return Table(
        headers=("hypothesis", *about, "at", "n", "estimate", "98 % interval", "expected", "state"),
        rows=rows,
        right=frozenset({2 + compared, 3 + compared}),
        styles=_STYLES,
    )


def _row(finding: Finding) -> list[str]:
    estimate, ends = "", ""
    if finding.estimate is not None and finding.low is not None and finding.high is not None:
        estimate, ends = words.interval(finding.estimate, finding.low, finding.high, finding.limits)
    return [
        words.levels(finding.at),
        str(finding.pairs),
        f"{estimate} {words.unit(finding.unit)}".strip(),
        ends,
        words.limits(*finding.limits) if finding.limits is not None else "all equal",
        finding.state.value,
    ]


def _name(judged: Judged) -> str:
    marks = ["post hoc"] if judged.post_hoc else []
    marks += ["after retraction"] if judged.after_retraction else []
    return f"{judged.name} ({', '.join(marks)})" if marks else judged.name


def _sentence(judged: Judged) -> str:
    return f"{_name(judged)} is {judged.state}: {judged.claim} ({judged.about}): {judged.why}."


def _notes(verdict: Verdict) -> list[str]:
    notes = []
    if verdict.blocks.measured < verdict.blocks.needed:
        notes.append(f"{verdict.blocks.measured} of {words.count(verdict.blocks.needed, 'block')} measured.")
    if verdict.stopped:
        notes.append("The run was stopped before all planned blocks were measured.")
    if verdict.wide and not verdict.stopped:
        more = f" (and {len(verdict.wide) - 1} more)" if len(verdict.wide) > 1 else ""
        told = "The run is not at its end: after" if verdict.unfinished else "After as many as there may be,"
        notes.append(
            f"{told} {words.count(verdict.blocks.measured, 'block')}, the interval of {verdict.wide[0]}{more} is, or was a "
            "block ago, wider than the half_width that is asked for."
        )
    if verdict.retracted:
        notes.append(_retracted(verdict.retracted))
    notes += [_unpassed(control) for control in verdict.controls]
    notes += [_aside(aside) for aside in verdict.set_aside]
    if len(verdict.conditions) > 1:
        notes.append(
            f"Findings rest on {len(verdict.conditions)} different conditions, each finding on one alone: "
            f"{words.listed(hash_[:8] for hash_ in verdict.conditions)}."
        )
    if any(judged.post_hoc for judged in verdict.hypotheses):
        notes.append(
            "Post hoc: stated or changed after there were data, so it was not at risk when they were taken."
        )
    return notes


def _retracted(gone: Sequence[Withdrawn]) -> str:
    told = words.listed(f"{one.record} ({one.reason})" for one in gone)
    seen = "it was" if len(gone) == 1 else "they were"
    return f"{words.count(len(gone), 'record')} retracted after {seen} seen: {told}."


def _unpassed(found: Unpassed) -> str:
    where = f"{found.count} of {words.count(found.of, 'record')}"
    return f"{found.control} {found.state} in {where}: {found.reason}."


def _aside(aside: SetAside) -> str:
    changed = words.changed(aside.differing)
    records = words.count(len(aside.records), "record")
    return f"Not pooled: {records} under other conditions ({changed or aside.conditions[:8]})."


def _judged_json(judged: Judged) -> dict[str, Any]:
    return {
        "claim": judged.claim,
        "about": judged.about,
        "state": judged.state,
        "post_hoc": judged.post_hoc,
        "after_retraction": judged.after_retraction,
        "why": judged.why,
        "findings": [_finding_json(finding) for finding in judged.findings],
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "at": dict(finding.at),
        "state": finding.state,
        "why": finding.why,
        "pairs": finding.pairs,
        "needed": finding.needed,
        "estimate": finding.estimate,
        "low": finding.low,
        "high": finding.high,
        "limits": None
        if finding.limits is None
        else [None if math.isinf(end) else end for end in finding.limits],
        "unit": finding.unit,
        "conditions": finding.conditions,
        "set_aside": [_aside_json(aside) for aside in finding.set_aside],
    }


def _aside_json(aside: SetAside) -> dict[str, Any]:
    return {
        "conditions": aside.conditions,
        "newest": aside.newest,
        "records": list(aside.records),
        "differing": {key: {"then": then, "now": now} for key, then, now in aside.differing},
    }
