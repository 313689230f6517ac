"""Initial weights follow from the seed and a weight's name, and from nothing else."""

from __future__ import annotations

import torch

from coresident.model.initial import initialise
from coresident.model.llama import Llama
from coresident.model.presets import PRESETS
from coresident.model.shape import ModelShape


def _weights(shape: ModelShape, seed: int) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in initialise(Llama(shape), seed).named_parameters()}


def test_a_seed_gives_the_same_weights_whatever_was_drawn_before(shape: ModelShape) -> None:
    first = _weights(shape, 0)
    torch.randn(17)
    again = _weights(shape, 0)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_another_seed_gives_others(shape: ModelShape) -> None:
    first, other = _weights(shape, 0), _weights(shape, 1)
    assert all(not torch.equal(first[name], other[name]) for name in first if first[name].ndim > 1)


def test_a_weight_does_not_depend_on_how_many_layers_there_are(shape: ModelShape) -> None:
    two, three = _weights(shape, 0), _weights(shape.model_copy(update={"layers": 3}), 0)
    assert torch.equal(two["layers.1.attention.qkv"], three["layers.1.attention.qkv"])
    assert not torch.equal(two["layers.1.attention.qkv"], three["layers.2.attention.qkv"])


def test_norms_are_one_and_no_weight_is_left_unset(shape: ModelShape) -> None:
    for weight in _weights(shape, 0).values():
        assert weight.isfinite().all()
        assert weight.ndim > 1 or (weight == 1).all()


def test_matrices_spread_by_a_fiftieth_and_those_into_the_residual_stream_by_less() -> None:
    for name in ("smoke", "moe-smoke"):
        for parameter, weight in _weights(PRESETS[name], 0).items():
            if weight.ndim > 1:
                residual = parameter.endswith(("attention.out", "feedforward.down"))
                wanted = 0.02 / (2 * PRESETS[name].layers) ** 0.5 if residual else 0.02
                # Five standard errors of the smallest matrix, a router of 512 weights.
                assert abs(float(weight.std()) / wanted - 1) < 0.16, parameter
                assert abs(float(weight.mean())) < 0.2 * wanted, parameter


def test_a_models_dtype_rounds_the_same_draws(shape: ModelShape) -> None:
    exact = _weights(shape, 0)
    rounded = dict(initialise(Llama(shape).to(torch.bfloat16), 0).named_parameters())
    assert all(torch.equal(rounded[name], weight.to(torch.bfloat16)) for name, weight in exact.items())
