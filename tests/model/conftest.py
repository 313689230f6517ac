"""Models of a few thousand parameters that compute all that large ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from coresident.model.initial import initialise
from coresident.model.llama import Llama
from coresident.model.shape import Mixture, ModelShape

DENSE = ModelShape(vocabulary=61, layers=2, width=24, heads=2, feedforward=40, context=32)
# Rows of whole 16 bytes, as grouped products want; twice an expert's width is not the model's, so that a transposed
# [gate, up] fails.
MIXTURE = DENSE.model_copy(
    update={"feedforward": None, "qk_norm": True, "mixture": Mixture(experts=6, top_k=2, width=16)}
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(params=[DENSE, MIXTURE], ids=["dense", "mixture"])
def shape(request: pytest.FixtureRequest) -> ModelShape:
    """Each kind of model in turn."""
    found: ModelShape = request.param
    return found


@pytest.fixture
def lively() -> Callable[..., Llama]:
    """A model whose every weight matters: norms away from 1, matrices large enough that logits spread."""

    def made(shape: ModelShape, *args: Any) -> Llama:
        model = initialise(Llama(shape, *args), seed=3)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.mul_(5 if parameter.ndim > 1 else 1).add_(0.1 * noise)
        return model

    return made


@pytest.fixture
def text() -> Callable[..., tuple[Tensor, Tensor]]:
    """Tokens [B, T] and the token after each."""

    def drawn(batch: int, length: int, vocabulary: int = 61) -> tuple[Tensor, Tensor]:
        rows = torch.randint(0, vocabulary, (batch, length + 1), generator=torch.Generator().manual_seed(5))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    return drawn
