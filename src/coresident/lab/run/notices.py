"""What a person should hear before anything is measured: claims that cannot be decided, or came after the data, and
controls that are left to the measured program.
"""

from __future__ import annotations

from coresident.lab.study.metrics import LAB_CONTROLS
from coresident.lab.study.plan import Plan, late
from coresident.lab.study.schema import Study
from coresident.lab.verdict import words
from coresident.lab.verdict.intervals import FEWEST
from coresident.workload import Workload


def notices(study: Study, workload: Workload, before: Plan | None, after: Plan) -> list[str]:
    """One sentence each. `before` and `after` are the run directory's plan without and with this study."""
    return [*undecidable(study), *unanswered(study, workload), *late(before, after)]


def going_on(study: Study, wide: list[str]) -> str:
    """Why a run goes on after the least number of blocks: the comparisons in `wide` are not known as closely as is asked."""
    limit = study.repetitions
    assert limit.until is not None
    more = f" (and {len(wide) - 1} more)" if len(wide) > 1 else ""
    return (
        f"going on after {words.count(limit.min, 'block')}, to {limit.limit} at most: the interval of {wide[0]}{more}"
        f" is, or was a block ago, wider than the half_width of {limit.until.half_width:g} that is asked for"
    )


def undecidable(study: Study) -> list[str]:
    """A sentence where the study's blocks are too few for some of its claims, whatever is measured."""
    if study.repetitions.limit >= FEWEST:
        return []
    names = [name for name, claim in study.hypotheses.items() if not claim.expect.same]
    if not names:
        return []
    blocks = words.count(study.repetitions.limit, "block")
    return [
        f"{blocks} can never decide {words.listed(names)}: an interval needs {FEWEST} (set repetitions.min to {FEWEST} or more)"
    ]


def unanswered(study: Study, workload: Workload) -> list[str]:
    """A sentence for each control that neither the lab nor the workload answers, which an `open` workload's program may."""
    known = sorted(workload.controls | LAB_CONTROLS)
    told = []
    for control in study.controls:
        if control not in known:
            near = next((name for name in known if control in name or name in control), None)
            meant = f" (did you mean {near!r}?)" if near else ""
            told.append(
                f"control {control!r} is not checked by the lab, and unverified unless the program reports it{meant}"
            )
    return told
