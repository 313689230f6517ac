"""How good predictions are, before any cache: recall@m and precision, of all steps and by family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coresident.engines.moe.predictors.fitted import Fitted, unseen
from coresident.engines.moe.predictors.ranking import ranked
from coresident.engines.moe.traces.traces import Traces
from coresident.errors import UserError


@dataclass(frozen=True)
class Judged:
    """`recall` is |predicted and chosen| / k, `precision` |predicted and chosen| / |predicted|, both over the layers from
    `depth` on, so that all predictors of one depth are judged on the same layers. `covered` is the share of all layers
    that something was predicted of.
    """

    recall: float
    precision: float
    covered: float
    steps: int


def judge(fitted: Fitted, traces: Traces, width: int, seed: int = 0) -> dict[str, Judged]:
    """By family, and over `all`; refuses prompts that it was fitted on."""
    unseen(fitted, traces)
    predictions = ranked(fitted, traces, width, seed)
    depth = fitted.described.depth
    found = {"all": score(traces, predictions, depth)}
    for family in traces.families:
        places = [place for place, one in enumerate(traces.prompts) if one.family == family]
        found[family] = score(traces.of(family=family), [predictions[place] for place in places], depth)
    return found


def score(traces: Traces, predictions: Sequence[NDArray[np.int16]], depth: int) -> Judged:
    """Of predictions int16 [steps, L, m], -1 for none, one array a prompt."""
    first = depth if depth < traces.layers else 0
    right, predicted, covered, steps = 0, 0, 0, 0
    for one, made in zip(traces.prompts, predictions, strict=True):
        right += int(_right(made[:, first:], one.decoded[:, first:]).sum())
        predicted += int((made[:, first:] >= 0).sum())
        covered += int((made >= 0).any(axis=-1).sum())
        steps += one.steps
    if not steps:
        raise UserError("the traces hold no decode step to judge", "trace with max_tokens above 1")
    return Judged(
        recall=right / (steps * (traces.layers - first) * traces.model.top_k),
        precision=right / max(1, predicted),
        covered=covered / (steps * traces.layers),
        steps=steps,
    )


def _right(made: NDArray[np.int16], chosen: NDArray[Any]) -> NDArray[np.bool_]:
    return np.asarray((made[..., :, None] == chosen.astype(np.int16)[..., None, :]).any(axis=-1))
