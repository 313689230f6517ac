"""What a simulation is asked: the workload `moe.simulate` and the command take the same."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from coresident.engines.moe.policies import HALF_LIFE
from coresident.engines.moe.predictors.kinds import Kind
from coresident.engines.moe.simulate.bounds import Cost
from coresident.engines.moe.simulate.lanes import Rule
from coresident.engines.moe.simulate.moments import Between
from coresident.workload import Parameters

_Size = Annotated[int, Field(ge=1)]


class Simulate(Parameters):
    """A decode of recorded prompts with bounded residents.

    `capacity` is slots a layer, one number or one for each layer. `split` and `families` choose the prompts; `between` says
    whether each starts with nothing resident. `predictor` fetches `width` experts (k by default) `depth` layers ahead: fitted
    here on the fit prompts, or, where there is something to fit, read from `fitted`: a directory of `fit-predictor`, or one of
    those in it. With `cost` there are times and bytes.
    """

    traces: str
    split: Literal["held-out", "fit", "all"] = "held-out"
    families: Annotated[tuple[str, ...], Field(strict=False)] = ()
    capacity: _Size | Annotated[tuple[_Size, ...], Field(min_length=1, strict=False)]
    policy: Rule = "lru"
    half_life: Annotated[float, Field(gt=0)] = HALF_LIFE
    between: Between = "fresh"
    predictor: Kind | None = None
    fitted: str | None = None
    depth: _Size = 1
    width: _Size | None = None
    seed: int = 0
    cost: Cost | None = None

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        if self.policy == "belady" and self.predictor is not None:
            raise ValueError("policy belady is a bound without fetching ahead; leave predictor out")
        return self
