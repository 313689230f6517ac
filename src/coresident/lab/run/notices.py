"""What a person should hear before anything is measured: claims that cannot be decided, or came after the data."""

from __future__ import annotations

from coresident.lab.study.plan import Plan, late
from coresident.lab.study.schema import Study
from coresident.lab.verdict import words
from coresident.lab.verdict.intervals import FEWEST


def notices(study: Study, before: Plan | None, after: Plan) -> list[str]:
    """One sentence each. `before` and `after` are the run directory's plan without and with this study."""
    return [*undecidable(study), *late(before, after)]


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
