"""Logistic regressions that share one bound: the minimum that a general optimiser finds."""

import numpy as np
import pytest
from scipy.optimize import minimize

from coresident.engines.moe.predictors.probe import log_probabilities, regress


def _data(n: int, features: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(0)
    x = log_probabilities(2 * source.normal(size=(n, features)))
    truth = source.normal(size=(features, outputs))
    chances = 1 / (1 + np.exp(-(x @ truth * 0.3 + 1)))
    return x, (source.random((n, outputs)) < chances).astype(np.float32)


def test_the_minimum_is_that_of_a_general_optimiser() -> None:
    x, y = _data(400, 6, 3)
    weights, biases = regress(x, y, ridge=2.0, steps=400)
    mean, deviation = x.mean(axis=0), x.std(axis=0)
    z = ((x - mean) / deviation).astype(np.float64)

    def loss(packed: np.ndarray, column: int) -> float:
        scores = z @ packed[:-1] + packed[-1]
        return float((np.logaddexp(0, scores) - y[:, column] * scores).sum() + (packed[:-1] ** 2).sum())

    for column in range(3):
        best = minimize(loss, np.zeros(7), args=(column,), method="L-BFGS-B", options={"maxiter": 500}).x
        found = np.append(weights[:, column] * deviation, biases[column] + mean @ weights[:, column])
        assert loss(found, column) == pytest.approx(loss(best, column), rel=1e-4)


def test_the_usual_number_of_steps_is_enough() -> None:
    x, y = _data(2000, 16, 16)
    few, many = regress(x, y), regress(x, y, steps=600)
    scores = [x @ weights + biases for weights, biases in (few, many)]
    losses = [(np.logaddexp(0, score) - y * score).mean() for score in scores]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_an_input_that_never_varies_and_a_label_that_never_comes_do_no_harm() -> None:
    x, y = _data(200, 5, 3)
    x[:, 2] = -4.0
    y[:, 1] = 0
    weights, biases = regress(x, y)
    assert np.isfinite(weights).all()
    assert np.isfinite(biases).all()
    assert ((x @ weights + biases)[:, 1] < 0).all()


def test_log_probabilities_do_not_depend_on_a_shift_and_do_not_overflow() -> None:
    logits = np.array([[1000.0, 999.0, -1000.0]], np.float16)
    found = log_probabilities(logits)
    np.testing.assert_allclose(found, log_probabilities(logits - 500), atol=1e-3)
    assert np.exp(found).sum() == pytest.approx(1)
