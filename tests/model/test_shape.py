"""A shape is refused before any tensor is made, and knows its parameters exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from coresident.model.llama import Llama
from coresident.model.presets import PRESETS
from coresident.model.shape import Mixture, ModelShape, active_parameters_of, parameters_of

SIZES: dict[str, Any] = {"vocabulary": 61, "layers": 2, "width": 24, "heads": 2, "feedforward": 40}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tied": False},
        {"qk_norm": True},
        {"feedforward": None, "mixture": Mixture(experts=6, top_k=2, width=20)},
        {
            "feedforward": None,
            "mixture": Mixture(experts=6, top_k=2, width=20),
            "qk_norm": True,
            "tied": False,
        },
    ],
)
def test_it_counts_the_parameters_that_the_model_has(change: dict[str, Any]) -> None:
    shape = ModelShape(**SIZES | change)
    assert parameters_of(shape) == sum(weight.numel() for weight in Llama(shape).parameters())


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_it_counts_those_of_every_preset(name: str) -> None:
    with torch.device("meta"):
        model = Llama(PRESETS[name])
    assert parameters_of(PRESETS[name]) == sum(weight.numel() for weight in model.parameters())


def test_of_a_mixture_a_token_uses_all_but_the_experts_it_is_not_sent_to() -> None:
    shape = ModelShape(**SIZES | {"feedforward": None, "mixture": Mixture(experts=6, top_k=2, width=20)})
    assert parameters_of(shape) - active_parameters_of(shape) == 2 * (6 - 2) * 3 * 24 * 20
    assert active_parameters_of(ModelShape(**SIZES)) == parameters_of(ModelShape(**SIZES))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"heads": 5}, "not divisible"),
        ({"width": 6, "heads": 2}, "odd"),
        ({"feedforward": None}, "either feedforward"),
        ({"mixture": Mixture(experts=6, top_k=2, width=20)}, "either feedforward"),
        ({"layers": 0}, "greater than or equal to 1"),
        ({"eps": 0.0}, "greater than 0"),
        ({"width": 24.0}, "valid integer"),
        ({"depth": 3}, "not permitted"),
    ],
)
def test_what_makes_no_model_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ModelShape(**SIZES | change)


def test_more_parameters_than_any_machine_holds_are_refused() -> None:
    expert = Mixture(experts=1 << 20, top_k=2, width=1 << 20)
    with pytest.raises(ValidationError, match=r"it has [\d,]+ parameters, and at most 10,000,000,000,000"):
        ModelShape(vocabulary=61, layers=1, width=1 << 20, heads=2, qk_norm=True, mixture=expert)


def test_a_token_cannot_go_to_more_experts_than_there_are() -> None:
    with pytest.raises(ValidationError, match="top_k 7 is more than the 6 experts"):
        Mixture(experts=6, top_k=7, width=20)
