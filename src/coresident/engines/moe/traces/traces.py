"""A set of routing traces in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coresident.engines.moe.traces.manifest import Router, Sampling, Split
from coresident.errors import UserError


@dataclass(frozen=True)
class Trace:
    """One prompt's routing. Rows are tokens: `prefill` of the prompt, then one a decode step.

    `tokens` int32 [T]; `experts` uint8 or uint16 [T, L, k], the likeliest first; `logits` float16 or float32 [T, L, N] raw;
    `ahead` [T, depths, L, width] ranked experts, 0 where layer l - depth is none.
    """

    name: str
    family: str
    split: Split
    prefill: int
    tokens: NDArray[np.int32]
    experts: NDArray[Any]
    logits: NDArray[Any] | None = None
    ahead: NDArray[Any] | None = None

    @property
    def steps(self) -> int:
        """Decode steps."""
        return len(self.tokens) - self.prefill

    @property
    def decoded(self) -> NDArray[Any]:
        """The experts of the decode steps [steps, L, k]."""
        return self.experts[self.prefill :]


@dataclass(frozen=True)
class Traces:
    """Traces of one model. `depths` are those that every trace's `ahead` has, in its order."""

    model: Router
    sampling: Sampling
    prompts: tuple[Trace, ...]
    depths: tuple[int, ...] = ()

    @property
    def layers(self) -> int:
        return len(self.model.layers)

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.family for one in self.prompts))

    def of(self, split: Split | None = None, family: str | None = None) -> Traces:
        """The prompts of a split and family only; raises UserError where there is none."""
        chosen = tuple(
            one for one in self.prompts if split in (None, one.split) and family in (None, one.family)
        )
        if not chosen:
            what = " and ".join(
                said for said in (split and f"split {split!r}", family and f"family {family!r}") if said
            )
            raise UserError(f"the traces hold no prompt of {what}", "trace such prompts, or choose others")
        return replace(self, prompts=chosen)


def kind(experts: int) -> type[np.unsignedinteger[Any]]:
    """The dtype of an expert's number."""
    return np.uint8 if experts <= 256 else np.uint16


def same_model(traces: Traces, identity: str, what: str) -> None:
    """Refuse to use `what`, made for the model `identity`, on traces of another."""
    if traces.model.identity != identity:
        raise UserError(
            f"{what} is of model {identity[:12]}, and the traces are of model {traces.model.identity[:12]}",
            "use traces of the same model, or trace this one by `coresident moe trace`",
        )
