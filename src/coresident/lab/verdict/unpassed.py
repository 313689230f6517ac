"""Which controls did not pass, how often, and why mostly: what a reader must know before believing a number."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from coresident.lab.records.schema import Record
from coresident.lab.verdict import words
from coresident.lab.verdict.model import Unpassed

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def of(records: Iterable[Record]) -> tuple[Unpassed, ...]:
    """One entry a control and state other than passed, in the controls' order, failed ones first.

    Reasons that differ only in their numbers are one reason; its first wording stands for all. Interrupted attempts are
    left out: no aggregate takes their numbers, so nobody needs to know what was not checked of them.
    """
    answered: Counter[str] = Counter()
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for record in records:
        if record.status == "interrupted":
            continue
        for name, control in record.controls.items():
            answered[name] += 1
            if control.state != "passed":
                said = control.reason or f"asked {words.plain(control.asked)}, ran {words.plain(control.ran)}"
                kinds = found.setdefault((name, control.state), {})
                kinds.setdefault(_NUMBER.sub("0", said), []).append(said)
    return tuple(
        Unpassed(name, state, sum(map(len, kinds.values())), answered[name], max(kinds.values(), key=len)[0])
        for (name, state), kinds in sorted(found.items())
    )
