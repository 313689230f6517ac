"""Writes what README.md and evidence/README.md say was measured, from the records under evidence/: `make readme`.

README has a row a run, with its first claim and how many of all came true; evidence/README.md has every claim. The demo's verdict
stands in README as `make demo` prints it. Nothing of it is typed by hand; a test checks that both hold what this makes.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from coresident.lab.records.schema import Record
from coresident.lab.records.store import Store
from coresident.lab.report import verdict_text
from coresident.lab.run.prepare import expanded
from coresident.lab.study.load import load
from coresident.lab.study.plan import Plan
from coresident.lab.verdict import words
from coresident.lab.verdict.judge import judge
from coresident.lab.verdict.model import Finding, Judged, State, Verdict

ROOT = Path(__file__).resolve().parent.parent
SUMMARY = """\
| study | on | its first claim | at | measured | all its claims |
| --- | --- | --- | --- | --- | --- |
"""
CLAIMS = """\
| claim | at | measured | blocks | verdict |
| --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Run:
    """A run directory, judged. `devices` are what it ran on, with the days."""

    place: Path
    devices: str
    verdict: Verdict
    question: str


def runs(evidence: Path) -> list[Run]:
    """Every run under `evidence`, devices and studies in the order of their names."""
    found = []
    for plan in sorted(evidence.glob("*/*/plan.json")):
        active, judged, question = _judged(plan.parent)
        devices = sorted({f"{one.environment['device']['name']}, {one.started[:10]}" for one in active})
        found.append(Run(plan.parent.relative_to(evidence), " and ".join(devices), judged, question))
    return found


def summary(evidence: Path) -> str:
    """A row a run: its first claim, and how all came out."""
    rows = []
    for one in runs(evidence):
        first = one.verdict.hypotheses[0]
        states = Counter(judged.state for judged in one.verdict.hypotheses)
        told = ", ".join(f"{states[state]} {state}" for state in State if state in states)
        where = f"[{one.verdict.study}](evidence/README.md#{one.verdict.study})"
        rows.append(_row([where, one.devices, first.claim, *_figures(first)[:2], told]))
    return SUMMARY + "".join(rows)


def claims(evidence: Path) -> str:
    """A table a run with every claim."""
    parts = []
    for one in runs(evidence):
        told = f"### {one.verdict.study}\n\n{one.question} On {one.devices}; records: [{one.place}]({one.place}).\n\n"
        rows = [_row([judged.claim, *_figures(judged), _state(judged)]) for judged in one.verdict.hypotheses]
        parts.append(told + CLAIMS + "".join(rows))
    return "\n".join(parts)


def _judged(run: Path) -> tuple[list[Record], Verdict, str]:
    loaded = load(run / "study.yaml")
    store = Store(run)
    active = store.active()
    plan = Plan.read(run / "plan.json")
    judged = judge(
        loaded.study, expanded(loaded, store.records())[1], active, plan.post_hoc, store.retractions()
    )
    return active, judged, loaded.study.question


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _state(judged: Judged) -> str:
    marks = [
        *(["post hoc"] if judged.post_hoc else []),
        *(["after retraction"] if judged.after_retraction else []),
    ]
    return f"{judged.state} ({', '.join(marks)})" if marks else f"{judged.state}"


def _figures(judged: Judged) -> tuple[str, str, str]:
    """Points, what was measured at them, and blocks. What is the same at every point is said once; else there is one entry a
    point, in their order.
    """
    return (
        "; ".join(words.levels(finding.at) for finding in judged.findings),
        _each("; ", [_measured(finding) for finding in judged.findings]),
        _each("; ", [str(finding.pairs) for finding in judged.findings]),
    )


def _each(between: str, entries: list[str]) -> str:
    return between.join(entries if len(set(entries)) > 1 else entries[:1])


def _measured(finding: Finding) -> str:
    if finding.estimate is None or finding.low is None or finding.high is None:
        return "all equal" if finding.limits is None and finding.state == "supported" else finding.why
    estimate, ends = words.interval(finding.estimate, finding.low, finding.high, finding.limits)
    return f"{estimate} {words.unit(finding.unit)} {ends}".replace("  ", " ")


def verdict(run: Path) -> str:
    """A run's verdict as the command prints it, with where its records then are, in a code block."""
    console = Console(file=io.StringIO(), width=100)
    judged = _judged(run)[1]
    verdict_text.terminal(judged, console)
    console.print(f"records: {Path('runs') / judged.study / 'records'}", markup=False, highlight=False)
    assert isinstance(console.file, io.StringIO)
    return "```\n" + "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n```\n"


def written(text: str, parts: Mapping[str, str]) -> str:
    """A page's text with what is measured between its markers."""
    for name, content in parts.items():
        start, end = f"<!-- {name}: start -->", f"<!-- {name}: end -->"
        before, rest = text.split(start)
        _, after = rest.split(end)
        text = f"{before}{start}\n{content}{end}{after}"
    return text


def pages(root: Path) -> dict[Path, str]:
    """The pages that hold measured figures, as they should be."""
    evidence = root / "evidence"
    parts = {
        root / "README.md": {"demo": verdict(evidence / "cpu" / "demo"), "measured": summary(evidence)},
        evidence / "README.md": {"claims": claims(evidence)},
    }
    return {page: written(page.read_text(encoding="utf-8"), each) for page, each in parts.items()}


if __name__ == "__main__":
    for page, text in pages(ROOT).items():
        page.write_text(text, encoding="utf-8")
