"""The named shapes list exactly the tensors that transformers' model of that configuration has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from coresident.engines.pool.base.shapes import SHAPES, weights


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_tensors_of_the_model(name: str) -> None:
    config: dict[str, Any] = dict(SHAPES[name])
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**config))
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items() if key not in tied}
    assert {weight.name: weight.shape for weight in weights(config)} == expected


@pytest.mark.parametrize(
    ("name", "parameters"),
    # As the model cards of Qwen2.5 state them: 0.49 B, 1.54 B, 7.61 B.
    [("qwen2.5-0.5b", 494_032_768), ("qwen2.5-1.5b", 1_543_714_304), ("qwen2.5-7b", 7_615_616_512)],
)
def test_the_published_shapes_have_the_published_sizes(name: str, parameters: int) -> None:
    assert sum(weight.elements for weight in weights(SHAPES[name])) == parameters


def test_small_is_about_100_mb_in_float32() -> None:
    assert 95e6 < 4 * sum(weight.elements for weight in weights(SHAPES["small"])) < 150e6
