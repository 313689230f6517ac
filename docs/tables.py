"""Writes the table of measured results in README.md from the records under evidence/: `make readme`.

Every run directory there gives one row a finding, with its blocks, its verdict and where its records are. Nothing in
the table is typed by hand; a test checks that README holds what this makes.
"""

from __future__ import annotations

from pathlib import Path

from coresident.lab.records.store import Store
from coresident.lab.run.prepare import expanded
from coresident.lab.study.load import load
from coresident.lab.study.plan import Plan
from coresident.lab.verdict import words
from coresident.lab.verdict.judge import judge
from coresident.lab.verdict.model import Finding

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- measured: start -->", "<!-- measured: end -->"
HEAD = """\
| study | on | claim | at | measured | blocks | verdict |
| --- | --- | --- | --- | --- | --- | --- |
"""


def table(evidence: Path) -> str:
    """The Markdown table of every run under `evidence`, devices and studies in the order of their names."""
    lines = []
    for plan in sorted(evidence.glob("*/*/plan.json")):
        run = plan.parent
        loaded = load(run / "study.yaml")
        active = Store(run).active()
        devices = sorted({f"{one.environment['device']['name']}, {one.started[:10]}" for one in active})
        judged = judge(loaded.study, expanded(loaded)[1], active, Plan.read(plan).post_hoc)
        where = f"[{loaded.study.study}]({run.relative_to(evidence.parent)})"
        for one in judged.hypotheses:
            for finding in one.findings:
                lines.append(_row(where, " and ".join(devices), one.claim, one.post_hoc, finding))
    return HEAD + "\n".join(lines) + "\n"


def _row(where: str, device: str, claim: str, post_hoc: bool, finding: Finding) -> str:
    measured = "all equal" if finding.limits is None and finding.state == "supported" else finding.why
    if finding.estimate is not None and finding.low is not None and finding.high is not None:
        estimate, ends = words.interval(finding.estimate, finding.low, finding.high, finding.limits)
        measured = f"{estimate} {finding.unit} {ends}".replace("  ", " ")
    state = f"{finding.state}{' (post hoc)' if post_hoc else ''}"
    cells = [where, device, claim, words.levels(finding.at), measured, str(finding.pairs), state]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def written(readme: str, measured: str) -> str:
    """README's text with the table between its two markers."""
    before, rest = readme.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n{measured}{END}{after}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(written(readme.read_text(encoding="utf-8"), table(ROOT / "evidence")), encoding="utf-8")
