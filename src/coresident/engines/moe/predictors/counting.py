"""What the fit prompts' decode steps count up to: how often each expert was chosen, and what followed on what."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coresident.engines.moe.traces.masks import masks
from coresident.engines.moe.traces.traces import Traces
from coresident.errors import UserError


def multi_hot(traces: Traces) -> NDArray[np.float32]:
    """All decode steps' choices, prompt after prompt: float32 [steps, L, N] of 0 and 1. Refuses traces without any."""
    if not any(one.steps for one in traces.prompts):
        raise UserError("the traces hold no decode step", "trace with max_tokens above 1")
    experts = traces.model.experts
    return np.concatenate([masks(one.decoded, experts) for one in traces.prompts]).astype(np.float32)


def frequency(traces: Traces) -> NDArray[np.float32]:
    """How often each layer chose each expert: [L, N]."""
    return np.asarray(multi_hot(traces).sum(axis=0))


def transition(traces: Traces, depth: int) -> NDArray[np.float32]:
    """[L, N, N]: how likely layer l chooses expert j, given that layer l - depth chose i. Zero for the first layers.

    Smoothed towards layer l's own frequencies by the weight of k choices, so that what was never seen says nothing.
    """
    chosen = multi_hot(traces)
    steps, layers, experts = chosen.shape
    found = np.zeros((layers, experts, experts), np.float32)
    weight = np.float32(traces.model.top_k)
    for layer in range(depth, layers):
        before, after = chosen[:, layer - depth], chosen[:, layer]
        own = after.sum(axis=0) / steps
        found[layer] = (before.T @ after + weight * own) / (before.sum(axis=0)[:, None] + weight)
    return found
