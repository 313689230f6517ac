"""The models that have a name."""

from __future__ import annotations

import pytest

from coresident.errors import UserError
from coresident.model.presets import PRESETS, preset
from coresident.model.shape import parameters_of


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("20m", 20_403_520),
        ("50m", 48_507_392),
        ("90m", 91_605_120),
        ("250m", 251_943_360),
        ("500m", 516_814_080),
    ],
)
def test_the_published_models_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert parameters_of(PRESETS[name]) == parameters
    assert PRESETS[name].head_width == 64
    assert PRESETS[name].context == 1024


def test_no_mixture_hides_a_transposed_expert() -> None:
    for shape in PRESETS.values():
        assert shape.mixture is None or 2 * shape.mixture.width != shape.width


def test_the_large_mixture_is_olmoes_grid_of_experts() -> None:
    shape = preset("moe-64")
    assert shape.mixture is not None
    assert (shape.layers, shape.mixture.experts, shape.mixture.top_k) == (16, 64, 8)


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no model preset '20M'; did you mean '20m'\?"):
        preset("20M")
