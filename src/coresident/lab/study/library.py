"""The studies that coresident ships, found by name, and the file that a new study starts from."""

from __future__ import annotations

import re
from pathlib import Path

from coresident.errors import UserError, nearest

_TEMPLATE = """\
# A study: what is measured, and what is claimed before any data is seen.
# Check it with `coresident run {name}.yaml --dry-run`, measure it with `coresident run {name}.yaml`.
study: {name}
question: Does sorting before summing change how long a small Python program takes?
workload: command            # any program; `coresident.workloads` of installed packages add more

parameters:                  # what all arms share
  cwd: .

arms:                        # what is compared: each is laid over `parameters`
  plain:
    argv: [python3, -c, "sum(range(2_000_000))"]
  sorted:
    argv: [python3, -c, "sum(sorted(range(2_000_000)))"]
  # A program reports metrics of its own as lines of JSON, from any language; in a shell:
  # reporting:
  #   shell: |
  #     echo '{{"event": "metric", "name": "speed", "value": 9.5, "unit": "1/s"}}' >> "$CORESIDENT_EVENTS/$$.jsonl"

# factors: {{env.SIZE: ["1", "2"]}}   # each level is measured with each arm

repetitions: {{min: 3, max: 9, until: {{half_width: 0.05}}}}

hypotheses:
  H1:
    claim: sorting first takes at most five times as long
    metric: wall_seconds
    compare: {{arm: sorted, to: plain}}
    expect: {{ratio: {{at_most: 5}}}}
"""


def shipped() -> dict[str, Path]:
    """The shipped studies: name to file."""
    folder = Path(__file__).parents[2] / "studies"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find(name_or_path: str | Path) -> Path:
    """The study file meant by a path or by a shipped study's name.

    A bare name means the shipped study, if there is one; anything else is a path. Raises `UserError` if
    neither exists.
    """
    text = str(name_or_path)
    ours = shipped()
    if text in ours:
        return ours[text]
    path = Path(text)
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError(
            f"{text} is a directory, not a study file", "give a YAML file or the name of a shipped study"
        )
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise UserError(
            f"study file {text} does not exist", "check the path; `coresident studies` lists shipped ones"
        )
    raise UserError(f"unknown study {text!r}", nearest(text, ours) + " (or give a path ending in .yaml)")


def template(name: str) -> str:
    """The text of a new study file called `name`: the shipped study of that name, or a commented start.

    A name that ends in .yaml or .yml is a file's; the study is called as what stands before.
    """
    name = study_name(name)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        remedy = "use letters, digits, '.', '_' and '-', starting with a letter or a digit (64 at most)"
        raise UserError(f"{name!r} is not usable as a study's name", remedy)
    ours = shipped()
    if name in ours:
        return ours[name].read_text(encoding="utf-8")
    return _TEMPLATE.format(name=name)


def study_name(name: str) -> str:
    """A study's name, whether that or its file's was given.

    >>> study_name("mine"), study_name("mine.yaml")
    ('mine', 'mine')
    """
    return re.sub(r"\.ya?ml$", "", name)
