"""A logistic regression a layer and expert: will layer l choose it, given layer l - depth's router log-probabilities?

All of a layer's regressions share their inputs. The logistic loss curves at most a quarter as much as the inputs' own moments,
so one factorisation serves every step and every expert, and no rate is tuned (Boehning and Lindsay, 1988). Steps are
accelerated as Nesterov's are, starting over wherever one goes against the slope (O'Donoghue and Candes, 2015).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coresident.engines.moe.predictors.counting import multi_hot
from coresident.engines.moe.traces.traces import Traces
from coresident.errors import UserError

Floats = NDArray[np.float32]
RIDGE = 1.0
STEPS = 40


def log_probabilities(logits: NDArray[Any]) -> Floats:
    """Of raw logits [..., N], in float32."""
    shifted = logits.astype(np.float32)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def fit(traces: Traces, depth: int, ridge: float = RIDGE, steps: int = STEPS) -> tuple[Floats, Floats]:
    """Weights [L, N, N] (log-probability of i -> score of j) and biases [L, N], zero for the first `depth` layers.

    Pairs are of one token, so they never cross a trace. Raises UserError where the traces have no logits.
    """
    chosen = multi_hot(traces)
    inputs = log_probabilities(np.concatenate([_logits(one.logits)[one.prefill :] for one in traces.prompts]))
    _, layers, experts = chosen.shape
    weights, biases = (
        np.zeros((layers, experts, experts), np.float32),
        np.zeros((layers, experts), np.float32),
    )
    for layer in range(depth, layers):
        weights[layer], biases[layer] = regress(inputs[:, layer - depth], chosen[:, layer], ridge, steps)
    return weights, biases


def regress(x: Floats, y: Floats, ridge: float = RIDGE, steps: int = STEPS) -> tuple[Floats, Floats]:
    """Logistic regressions of all columns of `y` [n, N] of 0 and 1 on `x` [n, F]: weights [F, N] and biases [N].

    Minimises the summed log loss and `ridge` / 2 times the squared weights of standardised inputs; biases are free.
    """
    y = np.ascontiguousarray(y)
    mean, deviation = x.mean(axis=0), x.std(axis=0)
    # Log-probabilities depend on one another, and one may not vary at all.
    deviation = np.where(deviation > 1e-6, deviation, np.float32(1))
    inputs = np.concatenate([(x - mean) / deviation, np.ones((len(x), 1), np.float32)], axis=1)
    penalty = np.full(inputs.shape[1], ridge, np.float32)
    penalty[-1] = 1e-6
    bound = inputs.T.astype(np.float64) @ inputs / 4 + np.diag(penalty.astype(np.float64))
    step = np.linalg.inv(bound).astype(np.float32)
    share = np.clip(y.mean(axis=0), 1e-4, 1 - 1e-4)
    best = np.zeros((inputs.shape[1], y.shape[1]), np.float32)
    best[-1] = np.log(share / (1 - share))
    ahead, momentum = best, 1.0
    for _ in range(steps):
        gradient = inputs.T @ (_sigmoid(inputs @ ahead) - y) + penalty[:, None] * ahead
        following = ahead - step @ gradient
        if float((gradient * (following - best)).sum()) > 0:
            momentum = 1.0
        grown = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = following + np.float32((momentum - 1) / grown) * (following - best)
        best, momentum = following, grown
    weights = np.asarray(best[:-1] / deviation[:, None], dtype=np.float32)
    return weights, np.asarray(best[-1] - mean @ weights, dtype=np.float32)


def _sigmoid(scores: Floats) -> Floats:
    scores *= np.float32(0.5)
    np.tanh(scores, out=scores)
    scores += np.float32(1)
    scores *= np.float32(0.5)
    return scores


def _logits(given: NDArray[Any] | None) -> NDArray[Any]:
    if given is None:
        raise UserError("the traces were kept without router logits", "trace again with logits=float16")
    return given
