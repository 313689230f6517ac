"""What a run directory was begun with, so that later runs add to it and never quietly change it.

Arms and factor levels may be added. Parameters, controls, an arm's meaning and the set of factors may not
change: their records would stand beside others that mean something else. A parameter that the workload has
got since is no change while it has its default. A hypothesis that comes, or changes, after data is marked
post hoc, for good.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coresident.errors import UserError
from coresident.lab.study.cells import canonical, digest, same_level
from coresident.lab.study.schema import Hypothesis, Level, Study
from coresident.workload import Workload

_REMEDY = "use another --out for a changed study, or change it back"


class Claim(BaseModel):
    """A hypothesis as first seen: the hash of all that decides it, and whether it came after data."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    hash: str
    post_hoc: bool


class Plan(BaseModel):
    """The content of `plan.json`: all arms, levels and hypotheses that this run directory has ever had."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: Literal[1] = 1
    study: str
    fingerprint: str
    workload: str
    parameters: dict[str, Any]
    controls: list[str]
    arms: dict[str, dict[str, Any]]
    factors: dict[str, list[Level]]
    hypotheses: dict[str, Claim] = Field(default_factory=dict)

    @property
    def post_hoc(self) -> frozenset[str]:
        """Names of the hypotheses that were stated, or changed, after data was seen."""
        return frozenset(name for name, claim in self.hypotheses.items() if claim.post_hoc)

    @classmethod
    def read(cls, path: Path) -> Plan:
        """The plan in a file. Raises `UserError` naming a file that is not a plan."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            reason = (error.strerror or "unknown error").lower()
            raise UserError(f"{path} cannot be read: {reason}", "give a readable run directory") from None
        except ValidationError as error:
            what = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in what["loc"])
            problem = f"{path} is not a plan of this version of coresident: {key}: {what['msg']}"
            raise UserError(problem, "use the version that wrote it, or another --out") from None

    def text(self) -> str:
        """The file's content."""
        return self.model_dump_json(indent=1) + "\n"


def fingerprint(study: Study, workload: Workload) -> str:
    """The study's identity: SHA-256 (hex) over workload, parameters with their defaults, and controls.

    Comments, order, repetitions, arms, levels and hypotheses leave it as it is.
    """
    return digest([workload.name, _completed(study.parameters, workload), sorted(set(study.controls))])


def reconcile(plan: Plan | None, study: Study, workload: Workload, has_data: bool) -> Plan:
    """The plan after a study has been brought to a run directory that was begun with `plan` (None: with
    nothing).

    `has_data` says whether any record is there. An arm or level that the study no longer has stays in the
    plan, so that it cannot come back as something else. Raises `UserError` naming what changed.
    """
    parameters, controls = _completed(study.parameters, workload), sorted(set(study.controls))
    arms: dict[str, dict[str, Any]] = {name: _plain(changes) for name, changes in study.arms.items()}
    factors: dict[str, list[Level]] = {name: list(levels) for name, levels in study.factors.items()}
    identity = fingerprint(study, workload)
    if plan is not None:
        _refuse_changes(plan, study, workload, parameters, controls, arms)
        parameters, identity = plan.parameters, plan.fingerprint
        arms = {**plan.arms, **arms}
        factors = {name: _joined(plan.factors[name], levels) for name, levels in factors.items()}
    return Plan(
        study=study.study,
        fingerprint=identity,
        workload=workload.name,
        parameters=parameters,
        controls=controls,
        arms=arms,
        factors=factors,
        hypotheses=_claims(plan, study, has_data),
    )


def late(before: Plan | None, after: Plan) -> list[str]:
    """A sentence for each hypothesis that `reconcile` has just marked, or marked again."""
    old = before.hypotheses if before is not None else {}
    return [
        f"{name} was {'changed' if name in old else 'added'} after data was seen: it is marked post hoc for good"
        for name, claim in after.hypotheses.items()
        if claim.post_hoc and (name not in old or old[name].hash != claim.hash)
    ]


def _refuse_changes(
    plan: Plan,
    study: Study,
    workload: Workload,
    parameters: dict[str, Any],
    controls: list[str],
    arms: dict[str, dict[str, Any]],
) -> None:
    if plan.study != study.study:
        raise UserError(
            f"this run directory holds study {plan.study!r}, not {study.study!r}", "use another --out"
        )
    if plan.workload != workload.name:
        raise UserError(f"workload changed from {plan.workload!r} to {workload.name!r}", _REMEDY)
    changed = _difference(_completed(plan.parameters, workload), parameters, "parameters")
    if changed is None and plan.controls != controls:
        changed = f"controls changed from {canonical(plan.controls)} to {canonical(controls)}"
    if changed is None and set(plan.factors) != set(study.factors):
        changed = (
            f"factors changed from {canonical(sorted(plan.factors))} to {canonical(sorted(study.factors))}"
        )
    for name, changes in arms.items():
        if changed is None and name in plan.arms:
            changed = _difference(plan.arms[name], changes, f"arms.{name}")
    if changed is not None:
        raise UserError(
            f"study {study.study!r} is not the one this run directory was begun with: {changed}", _REMEDY
        )


def _claims(plan: Plan | None, study: Study, has_data: bool) -> dict[str, Claim]:
    claims = dict(plan.hypotheses) if plan is not None else {}
    for name, hypothesis in study.hypotheses.items():
        hashed, old = _claim_hash(hypothesis, study), claims.get(name)
        late = has_data and (old is None or old.hash != hashed)
        claims[name] = Claim(hash=hashed, post_hoc=late or (old is not None and old.post_hoc))
    return claims


def _claim_hash(hypothesis: Hypothesis, study: Study) -> str:
    # The noise floor decides with the hypothesis, so widening it after data changes the claim.
    return digest(_plain([hypothesis.model_dump(mode="json", by_alias=True), study.noise_floor]))


def _completed(parameters: dict[str, Any], workload: Workload) -> Any:
    """A study's common parameters with defaults filled in; as they stand where only an arm or a factor completes
    them.
    """
    try:
        resolved = workload.parameters.model_validate_json(canonical(parameters))
    except ValidationError:
        return _plain(parameters)
    return _plain(resolved.model_dump(mode="json", by_alias=True))


def _plain(value: Any) -> Any:
    """The same value with 1.0 written 1, so that only changes of meaning count."""
    if isinstance(value, dict):
        return {key: _plain(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(below) for below in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _joined(old: list[Level], new: list[Level]) -> list[Level]:
    return old + [level for level in new if not any(same_level(level, one) for one in old)]


def _difference(old: Any, new: Any, key: str) -> str | None:
    """The first difference in words, None if there is none."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            if name not in old:
                return f"{key}.{name} was added"
            if name not in new:
                return f"{key}.{name} was removed"
            found = _difference(old[name], new[name], f"{key}.{name}")
            if found is not None:
                return found
        return None
    return (
        None
        if canonical(old) == canonical(new)
        else f"{key} changed from {canonical(old)} to {canonical(new)}"
    )
