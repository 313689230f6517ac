"""Does everything that a study names exist: arms, factors, levels, metrics, controls?"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from coresident.errors import UserError, nearest
from coresident.lab.study.cells import Cell, canonical, matches, same_level
from coresident.lab.study.metrics import BUILT_IN_METRICS, LAB_CONTROLS
from coresident.lab.study.schema import Hypothesis, Study
from coresident.lab.study.source import Source
from coresident.workload import Workload


def check(study: Study, workload: Workload, cells: Sequence[Cell], source: Source | None = None) -> None:
    """Refuse a study whose controls or hypotheses name what is not there (an `open` workload may report
    anything).

    Raises `UserError` with the key, its line where `source` knows it, and the nearest name.
    """
    source = source or Source(f"study {study.study}")
    _controls(study, workload, source)
    for name, hypothesis in study.hypotheses.items():
        _metric(name, hypothesis, workload, cells, source)
        _arms(name, hypothesis, study, source)
        _factors(name, hypothesis, study, source)
        _not_empty(name, hypothesis, cells, source)


def _controls(study: Study, workload: Workload, source: Source) -> None:
    known = workload.controls | LAB_CONTROLS
    for at, control in enumerate(study.controls):
        where = source.where(("controls", at))
        if control in study.controls[:at]:
            raise UserError(f"{where}: control {control!r} is listed twice", "remove one of them")
        if control in known:
            continue
        if not workload.open:
            problem = f"{where}: workload {workload.name} answers no control {control!r}"
            raise UserError(problem, nearest(control, known))
        # An open workload may answer any; a misspelt one would stay unverified in every record.
        if difflib.get_close_matches(control, known, 1, cutoff=0.8):
            raise UserError(f"{where}: nothing answers a control {control!r}", nearest(control, known))


def _metric(
    name: str, hypothesis: Hypothesis, workload: Workload, cells: Sequence[Cell], source: Source
) -> None:
    metric = hypothesis.metric
    known = {one.name for one in workload.metrics} | set(BUILT_IN_METRICS)
    if metric is None or metric in known:
        return
    where = source.where(("hypotheses", name, "metric"))
    if not workload.open:
        raise UserError(f"{where}: workload {workload.name} has no metric {metric!r}", nearest(metric, known))
    # What an open workload will report is not known yet, but a misspelt name would cost a whole run.
    declared = {key for cell in cells for key in cell.parameters.get("metrics") or {}}
    if metric not in declared and difflib.get_close_matches(metric, known, 1, cutoff=0.8):
        raise UserError(
            f"{where}: nothing declares a metric {metric!r}",
            f"{nearest(metric, known)} (if not, declare it in parameters.metrics)",
        )


def _arms(name: str, hypothesis: Hypothesis, study: Study, source: Source) -> None:
    compare = hypothesis.compare
    for key, arm in (("arm", compare.arm), ("to", compare.to)):
        if arm is not None and arm not in study.arms:
            where = source.where(("hypotheses", name, "compare", key))
            raise UserError(f"{where}: there is no arm {arm!r}", nearest(arm, study.arms))
    if compare.arm == compare.to:
        where = source.where(("hypotheses", name, "compare", "to"))
        raise UserError(f"{where}: arm {compare.arm!r} is compared to itself", "name another arm")


def _factors(name: str, hypothesis: Hypothesis, study: Study, source: Source) -> None:
    compare, base = hypothesis.compare, ("hypotheses", name, "compare")
    for factor, level in compare.at.items():
        where = source.where((*base, "at", factor))
        if factor not in study.factors:
            raise UserError(f"{where}: there is no factor {factor!r}", nearest(factor, study.factors))
        levels = study.factors[factor]
        if not any(same_level(level, one) for one in levels):
            shown = [canonical(one) for one in levels]
            problem = f"{where}: factor {factor!r} has no level {canonical(level)}"
            raise UserError(problem, nearest(canonical(level), shown))
    slope = compare.slope
    if slope is None:
        return
    where = source.where((*base, "slope"))
    if slope not in study.factors:
        raise UserError(f"{where}: there is no factor {slope!r}", nearest(slope, study.factors))
    if slope in compare.at:
        raise UserError(f"{where}: {slope!r} cannot vary and be fixed by `at`", "remove it from `at`")
    levels = study.factors[slope]
    if any(isinstance(level, bool | str) for level in levels):
        raise UserError(
            f"{where}: a slope needs numeric levels, and {slope!r} has others", "name a numeric factor"
        )
    if len(levels) < 2:
        raise UserError(f"{where}: a slope needs two levels of {slope!r}, there is one", "add a level")


def _not_empty(name: str, hypothesis: Hypothesis, cells: Sequence[Cell], source: Source) -> None:
    if not any(cell.arm == hypothesis.compare.arm and matches(cell, hypothesis) for cell in cells):
        where = source.where(("hypotheses", name, "compare"))
        raise UserError(f"{where}: no cell of the study is meant", "correct `at`")
