"""How a trace's tokens are drawn."""

from __future__ import annotations

import pytest
import torch

from coresident.engines.moe.traces.routed import drawn
from coresident.errors import UserError


@pytest.mark.parametrize("temperature", [0.0, 1e-40])
def test_almost_no_temperature_is_the_likeliest_that_may_be_drawn(temperature: float) -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, -5.0]])
    assert drawn(scores, [torch.Generator()], temperature, [1]).tolist() == [2]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_scores_that_are_no_numbers_are_not_drawn_from(temperature: float) -> None:
    with pytest.raises(UserError, match="no finite number"):
        drawn(torch.tensor([[1.0, torch.nan]]), [torch.Generator()], temperature, [])
