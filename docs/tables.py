"""Writes what README.md says was measured from the records under evidence/: `make readme`.

Every run directory there gives one row a claim, with its blocks, its verdict and where its records are; the demo's
verdict stands above as `make demo` prints it. Nothing of it is typed by hand; a test checks that README holds what this
makes.
"""

from __future__ import annotations

import io
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
from coresident.lab.verdict.model import Finding, Judged, Verdict

ROOT = Path(__file__).resolve().parent.parent
HEAD = """\
| study | on | claim | at | measured | blocks | verdict |
| --- | --- | --- | --- | --- | --- | --- |
"""


def table(evidence: Path) -> str:
    """The Markdown table of every run under `evidence`, devices and studies in the order of their names."""
    lines = []
    for plan in sorted(evidence.glob("*/*/plan.json")):
        run = plan.parent
        active, judged = _judged(run)
        devices = sorted({f"{one.environment['device']['name']}, {one.started[:10]}" for one in active})
        where = f"[{judged.study}]({run.relative_to(evidence.parent)})"
        lines += [_row(where, " and ".join(devices), one) for one in judged.hypotheses]
    return HEAD + "\n".join(lines) + "\n"


def _judged(run: Path) -> tuple[list[Record], Verdict]:
    loaded = load(run / "study.yaml")
    store = Store(run)
    active = store.active()
    plan = Plan.read(run / "plan.json")
    return active, judge(loaded.study, expanded(loaded)[1], active, plan.post_hoc, store.retractions())


def _row(where: str, device: str, judged: Judged) -> str:
    """What of several points is the same is said once."""
    marks = [
        *(["post hoc"] if judged.post_hoc else []),
        *(["after retraction"] if judged.after_retraction else []),
    ]
    state = f"{judged.state} ({', '.join(marks)})" if marks else f"{judged.state}"
    points = "; ".join(words.levels(finding.at) for finding in judged.findings)
    measured = "; ".join(dict.fromkeys(_measured(finding) for finding in judged.findings))
    blocks = ", ".join(dict.fromkeys(str(finding.pairs) for finding in judged.findings))
    cells = [where, device, judged.claim, points, measured, blocks, state]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


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


def written(readme: str, evidence: Path) -> str:
    """README's text with what is measured between its markers."""
    for name, content in (("demo", verdict(evidence / "cpu" / "demo")), ("measured", table(evidence))):
        start, end = f"<!-- {name}: start -->", f"<!-- {name}: end -->"
        before, rest = readme.split(start)
        _, after = rest.split(end)
        readme = f"{before}{start}\n{content}{end}{after}"
    return readme


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(written(readme.read_text(encoding="utf-8"), ROOT / "evidence"), encoding="utf-8")
