"""What a study file may say: the question, what is measured, and what is claimed before any data is seen."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Level = bool | int | float | str
Outcome = Literal["ok", "oom", "nonfinite", "timeout"]


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


Sentence = Annotated[str, AfterValidator(_not_empty)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Bound(_Strict):
    """Where a number is expected to lie: exactly one of the three forms."""

    at_least: float | None = None
    at_most: float | None = None
    within: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        given = [form for form in ("at_least", "at_most", "within") if getattr(self, form) is not None]
        if len(given) != 1:
            raise ValueError("give exactly one of at_least, at_most, within")
        if self.within is not None and self.within[0] >= self.within[1]:
            raise ValueError("within: the lower limit must be below the upper")
        return self

    @property
    def limits(self) -> tuple[float, float]:
        """The closed interval in which the claim is true (with infinities for the open sides)."""
        if self.within is not None:
            return self.within[0], self.within[1]
        low = -float("inf") if self.at_least is None else self.at_least
        return low, float("inf") if self.at_most is None else self.at_most


class StatusBound(_Strict):
    """How often cells should end with a given outcome."""

    is_: Outcome = Field(alias="is")
    at_least: Annotated[float, Field(ge=0, le=1)] | None = None
    at_most: Annotated[float, Field(ge=0, le=1)] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give exactly one of at_least, at_most")
        return self


class Expect(_Strict):
    """Exactly one expectation: a ratio or a difference of two arms, an arm's value, sameness, or a rate of outcomes."""

    ratio: Bound | None = None
    difference: Bound | None = None
    value: Bound | None = None
    same: Literal[True] | None = None
    status: StatusBound | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = ("ratio", "difference", "value", "same", "status")
        if sum(getattr(self, kind) is not None for kind in kinds) != 1:
            raise ValueError("give exactly one of ratio, difference, value, same, status")
        if self.ratio is not None and self.ratio.limits[1] <= 0:
            raise ValueError("ratio: a ratio is positive, so its limits must be")
        return self

    @property
    def bound(self) -> Bound | None:
        """Where a metric's ratio, difference or value should lie; None where no metric is claimed."""
        return self.ratio or self.difference or self.value


class Compare(_Strict):
    """Which cells the claim is about.

    `arm` against `to` (needed by ratio, difference and same), at the named factor levels; levels left out are all of
    them, each judged alone, and the claim holds only if it holds at each. `slope` replaces the metric by its
    least-squares slope over a factor.
    """

    arm: Name
    to: Name | None = None
    at: dict[str, Level] = Field(default_factory=dict)
    slope: str | None = None


class Hypothesis(_Strict):
    """One claim, stated so that data can refute it."""

    claim: Sentence
    metric: str | None = None
    compare: Compare
    expect: Expect

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        needs_metric = self.expect.bound is not None
        pairs = self.expect.ratio or self.expect.difference or self.expect.same
        if needs_metric and self.metric is None:
            raise ValueError("metric: a ratio, a difference or a value needs the metric it is about")
        if not needs_metric and self.metric is not None:
            raise ValueError("metric: `same` and `status` are not about a metric")
        if pairs and self.compare.to is None:
            raise ValueError("compare.to: a ratio, a difference or `same` needs the arm to compare to")
        if not pairs and self.compare.to is not None:
            raise ValueError("compare.to: a value or a status is about one arm alone")
        if self.compare.slope is not None and not needs_metric:
            raise ValueError("compare.slope: only a metric has a slope")
        return self


class Until(_Strict):
    """When a comparison is narrow enough: half the width of its interval, relative to its estimate."""

    half_width: Annotated[float, Field(gt=0, lt=1)]


class Repetitions(_Strict):
    """How many blocks: `min`; or from `min` to `max`, stopping once `until` holds for every comparison."""

    min: Annotated[int, Field(ge=1, le=1000)] = 3
    max: Annotated[int, Field(ge=1, le=1000)] | None = None
    until: Until | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max is not None and self.min > self.max:
            raise ValueError(f"min ({self.min}) is above max ({self.max})")
        if self.max is not None and self.max != self.min and self.until is None:
            raise ValueError("max above min needs `until`, which says when to stop in between")
        return self

    @property
    def limit(self) -> int:
        """Blocks measured at most; without a `max`, three times `min` where `until` may ask for more."""
        if self.max is not None:
            return self.max
        return self.min if self.until is None else 3 * self.min


class Study(_Strict):
    """A whole study file. `device` says what its question is about: on a CPU a study of a card would be refused."""

    study: Name
    question: Sentence
    workload: str
    device: Literal["any", "card"] = "any"
    parameters: dict[str, Any] = Field(default_factory=dict)
    arms: Annotated[dict[Name, dict[str, Any]], Field(min_length=1)]
    factors: dict[str, Annotated[list[Level], Field(min_length=1)]] = Field(default_factory=dict)
    repetitions: Repetitions = Repetitions()
    controls: list[str] = Field(default_factory=list)
    hypotheses: dict[Name, Hypothesis] = Field(default_factory=dict)
    timeout: Annotated[float, Field(gt=0, le=7 * 86400)] = 3600.0
    grace: Annotated[float, Field(gt=0, le=600)] = 10.0
    attempts: Annotated[int, Field(ge=1, le=20)] = 2
    seed: Annotated[int, Field(ge=0)] = 0
    noise_floor: Annotated[float, Field(ge=0, lt=1)] = 0.002
    clean_device_mib: Annotated[float, Field(ge=0)] = 500.0
