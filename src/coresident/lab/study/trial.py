"""A study made from two commands, for `coresident try`: B against A, in alternating order, until the ratio is known."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from coresident.errors import UserError
from coresident.lab.study.load import Loaded, load_text
from coresident.lab.study.source import render

LONGEST_RETRY = 4  # times `repetitions`
MOST = 1000


def trial(commands: Sequence[str], metric: str, repetitions: int, half_width: float) -> Loaded:
    """The study that compares two shell commands by `metric`. Raises `UserError` naming the option or the command."""
    if len(commands) != 2:
        raise UserError(
            f"try compares two commands, {len(commands)} given",
            "quote each as one word: coresident try -- 'COMMAND A' 'COMMAND B'",
        )
    for command, name in zip(commands, "AB", strict=True):
        if not command.strip():
            raise UserError(f"command {name} is empty", "give what a shell would run")
    if not metric.strip():
        raise UserError("--metric is empty", "give a metric's name, such as wall_seconds")
    if not 1 <= repetitions <= MOST:
        raise UserError(f"--repetitions {repetitions} is not from 1 to {MOST}", "give for example 5")
    if not 0 < half_width < 1:
        raise UserError(
            f"--half-width {half_width:g} is not between 0 and 1", "give for example 0.02, for 2 %"
        )
    study = {
        "study": "try",
        "question": f"Does command B take less {metric} than command A?",
        "workload": "command",
        "arms": {name: {"shell": command} for name, command in zip("AB", commands, strict=True)},
        "repetitions": {
            "min": repetitions,
            "max": min(LONGEST_RETRY * repetitions, MOST),
            "until": {"half_width": half_width},
        },
        "controls": ["exclusive-device"],
        "hypotheses": {
            "b-below-a": {
                "claim": f"B takes less {metric} than A",
                "metric": metric,
                "compare": {"arm": "B", "to": "A"},
                "expect": {"ratio": {"at_most": 1.0}},
            }
        },
    }
    return load_text(render(study), "coresident try")


def fresh_directory(parent: Path) -> Path:
    """A run directory that nobody has, named by the time; made here, so that two trials in one second differ."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        path = parent / (f"try-{stamp}" if number == 1 else f"try-{stamp}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"cannot write to {parent}: {error.strerror}", "choose another place by --out"
            ) from None
        return path
    raise UserError(f"{parent} has too many trials of this second", "choose another place by --out")
