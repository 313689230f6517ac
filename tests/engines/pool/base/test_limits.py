"""What a base does not have is refused from its files, before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coresident.engines.pool.base import limits
from coresident.engines.pool.parameters import DPO
from coresident.errors import UserError


def asked(base: Path, **more: Any) -> DPO:
    return DPO.model_validate({"base": {"path": str(base)}, **more})


def test_a_base_that_has_what_is_asked_for_is_taken(tiny_base: Path) -> None:
    limits.check(asked(tiny_base, max_length=256, targets=["q_proj", "mlp.up_proj", "lm_head"]))
    limits.check(DPO(max_length=2048))


def test_a_layer_that_it_does_not_have_is_named_with_the_nearest(tiny_base: Path) -> None:
    with pytest.raises(UserError, match=f"targets: the base {tiny_base} has no layer 'q_prj'") as refused:
        limits.check(asked(tiny_base, targets=["q_prj"]))
    assert "did you mean 'q_proj'?" in refused.value.remedy


def test_a_mixture_of_experts_is_no_base(tiny_base: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_base / name).read_bytes())
    tensors = load_file(tiny_base / "model.safetensors")
    tensors |= {"model.layers.0.mlp.experts.3.gate_proj.weight": torch.zeros(2, 2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="is a Mixture of Experts") as refused:
        limits.check(asked(tmp_path))
    assert "dense" in refused.value.remedy


def test_rows_above_its_context_are_refused_whoever_asks_for_them(tiny_base: Path) -> None:
    for more in ({"max_length": 257}, {"learners": 2, "own": [{}, {"max_length": 257}]}):
        with pytest.raises(
            UserError, match=r"max_length 257 is more than the context .*256 tokens"
        ) as refused:
            limits.check_length(asked(tiny_base, **more))
        assert "--set max_length=256" in refused.value.remedy


def test_a_row_is_as_long_as_usual_or_as_the_context() -> None:
    assert [limits.row(config) for config in ({}, {"n_positions": 64}, {"max_position_embeddings": 9999})] == [
        256, 64, 256,
    ]  # fmt: skip
