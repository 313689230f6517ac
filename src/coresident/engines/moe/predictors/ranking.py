"""Asking a predictor: which experts will each step choose, best first, said before they are needed?"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coresident.engines.moe.predictors import probe
from coresident.engines.moe.predictors.fitted import Fitted, deep_enough
from coresident.engines.moe.predictors.kinds import ACROSS, READS_LOGITS, Kind
from coresident.engines.moe.traces.masks import masks
from coresident.engines.moe.traces.traces import Trace, Traces
from coresident.errors import UserError


def ranked(fitted: Fitted, traces: Traces, width: int, seed: int = 0) -> list[NDArray[np.int16]]:
    """For each prompt int16 [steps, L, width]: what each decode step is predicted to choose, best first, -1 for nothing."""
    described = fitted.described
    if not 1 <= width <= traces.model.experts:
        raise UserError(
            f"{width} experts cannot be predicted of {traces.model.experts}", "give a width within them"
        )
    allowed(described.kind, described.depth, traces)
    return [_ranked(fitted, traces, one, width, seed) for one in traces.prompts]


def allowed(kind: Kind, depth: int, traces: Traces) -> None:
    """Raises UserError where the traces do not hold what the predictor looks at, or have no layer so far ahead."""
    deep_enough(kind, depth, traces.layers)
    if kind in READS_LOGITS and any(one.logits is None for one in traces.prompts):
        raise UserError(
            f"predictor {kind} reads router logits, and the traces were kept without",
            "trace again with logits=float16",
        )
    if kind == "next-router" and (
        depth not in traces.depths or any(one.ahead is None for one in traces.prompts)
    ):
        raise UserError(
            f"predictor next-router needs what routers saw {depth} layers ahead, and the traces have "
            f"{', '.join(map(str, traces.depths)) or 'none'}",
            "trace again with that depth among `depths`",
        )


def _ranked(fitted: Fitted, traces: Traces, one: Trace, width: int, seed: int) -> NDArray[np.int16]:
    kind, depth = fitted.described.kind, fitted.described.depth
    shape = (one.steps, traces.layers, traces.model.experts)
    if kind in ("previous-token", "oracle"):
        start = one.prefill - (kind == "previous-token")
        found = _widened(one.experts[start : start + one.steps], width)
    elif kind == "next-router":
        found = _widened(_ahead(one, traces, depth, width), width)
    elif kind == "chance":
        source = np.random.default_rng([seed, *hashlib.sha256(one.name.encode()).digest()])
        found = _best(source.random(shape, dtype=np.float32), width)
    elif kind == "static":
        found = _best(np.broadcast_to(fitted.tables["scores"], shape), width)
    elif kind == "previous-rank":
        assert one.logits is not None
        found = _best(one.logits[one.prefill - 1 :][: one.steps], width)
    else:
        found = _best(_scores(fitted, one, shape), width)
    if kind in ACROSS:
        found[:, :depth] = -1
    return found


def _scores(fitted: Fitted, one: Trace, shape: tuple[int, int, int]) -> NDArray[np.float32]:
    """[steps, L, N] of a transition table or a probe; the first layers' mean nothing."""
    depth, experts = fitted.described.depth, shape[-1]
    if fitted.described.kind == "transition":
        inputs, tables = masks(one.decoded, experts).astype(np.float32), fitted.tables["scores"]
        biases = np.zeros(shape[1:], np.float32)
    else:
        assert one.logits is not None
        inputs = probe.log_probabilities(one.logits[one.prefill :])
        tables, biases = fitted.tables["weights"], fitted.tables["biases"]
    found = np.zeros(shape, np.float32)
    for layer in range(depth, shape[1]):
        found[:, layer] = inputs[:, layer - depth] @ tables[layer] + biases[layer]
    return found


def _ahead(one: Trace, traces: Traces, depth: int, width: int) -> NDArray[Any]:
    assert one.ahead is not None
    if width > one.ahead.shape[-1]:
        raise UserError(
            f"the traces keep the first {one.ahead.shape[-1]} experts of a router ahead, and {width} are asked for",
            f"ask for at most {one.ahead.shape[-1]}, or trace again with a larger `ahead`",
        )
    return one.ahead[one.prefill :, traces.depths.index(depth)]


def _best(scores: NDArray[Any], width: int) -> NDArray[np.int16]:
    """The `width` highest, highest first, the lowest number among equals."""
    order = np.argsort(-scores.astype(np.float32), axis=-1, kind="stable")
    return order[..., :width].astype(np.int16)


def _widened(ranked_: NDArray[Any], width: int) -> NDArray[np.int16]:
    found = np.full((*ranked_.shape[:-1], width), -1, np.int16)
    taken = ranked_[..., :width]
    found[..., : taken.shape[-1]] = taken
    return found
