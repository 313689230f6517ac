"""Every tensor has a name, a place and a shape; what has not is an error that names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coresident.engines.moe.models import architecture
from coresident.engines.moe.models.checkpoint import open_checkpoint
from coresident.engines.moe.models.origins import Files
from coresident.errors import UserError

Saved = Callable[[str], Path]


@pytest.fixture
def copied(saved: Saved, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a saved model to damage."""

    def copy(name: str) -> Path:
        shutil.copytree(saved(name), tmp_path / name)
        return tmp_path / name

    return copy


def changed(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Rewrite the weights."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def configured(directory: Path, **values: Any) -> None:
    """Rewrite the config."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_stacked_and_separate_experts_are_the_same_model(saved: Saved) -> None:
    apart, stacked = Files(open_checkpoint(saved("olmoe"))), Files(open_checkpoint(saved("stacked")))
    assert apart.identity == stacked.identity
    for layer in range(3):
        for expert in range(8):
            for one, other in zip(apart.expert(layer, expert), stacked.expert(layer, expert), strict=True):
                assert torch.equal(one, other)


def test_another_model_has_another_identity(saved: Saved, copied: Callable[[str], Path]) -> None:
    path = copied("olmoe")

    def train(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.2.mlp.experts.7.down_proj.weight"] *= 1.01

    changed(path, train)
    assert open_checkpoint(path).identity != open_checkpoint(saved("olmoe")).identity


def test_a_dense_layer_among_sparse_ones_in_many_shards(saved: Saved) -> None:
    found = open_checkpoint(saved("qwen3"))
    assert found.architecture.mixtures == (0, 2, 3)
    assert len({piece.file for piece in found.dense.values()}) > 3
    assert "model.layers.1.mlp.up_proj.weight" in found.dense


def test_half_precision_is_kept_as_stored(copied: Callable[[str], Path]) -> None:
    path = copied("olmoe")

    def halve(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(torch.bfloat16)

    changed(path, halve)
    found = open_checkpoint(path)
    assert (found.expert_dtype, found.uniform) == ("BF16", True)

    def widen(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.0.mlp.experts.0.up_proj.weight"
        tensors[name] = tensors[name].half()

    changed(path, widen)
    found = open_checkpoint(path)
    assert (found.expert_dtype, found.uniform) == ("F32", False)


NAME = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(NAME), f"the tensor {NAME} is missing"),
        (lambda t: t.pop("model.layers.0.self_attn.q_norm.weight"), "q_norm.weight is missing"),
        (lambda t: t.update(stray=torch.zeros(2)), "its tensor stray has no place"),
        (lambda t: t.update({NAME: t[NAME].T.contiguous()}), r"is F32 \[64, 96\], .* says floats \[96, 64\]"),
        (lambda t: t.update({NAME: t[NAME].to(torch.int32)}), "is I32"),
    ],
    ids=["expert-missing", "norm-missing", "extra", "transposed", "integers"],
)
def test_a_tensor_that_does_not_fit_is_named(
    change: Callable[[dict[str, Tensor]], Any], said: str, copied: Callable[[str], Path]
) -> None:
    path = copied("olmoe")
    changed(path, change)
    with pytest.raises(UserError, match=said):
        open_checkpoint(path)


def test_missing_files_are_named(copied: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config.json does not exist"):
        open_checkpoint(tmp_path)
    path = copied("qwen3")
    shard = sorted(path.glob("*.safetensors"))[4]
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard.name} does not exist"):
        open_checkpoint(path)
    shard.write_bytes(content[:-100])
    with pytest.raises(UserError, match="is cut short"):
        open_checkpoint(path)
    shard.write_bytes(content[:4])
    with pytest.raises(UserError, match=f"{shard.name} cannot be read"):
        open_checkpoint(path)


def test_one_file_without_an_index_and_none_at_all(copied: Callable[[str], Path]) -> None:
    path = copied("olmoe")
    (path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"holds neither model.safetensors nor"):
        open_checkpoint(path)


def test_two_models_in_one_directory_are_refused(copied: Callable[[str], Path]) -> None:
    path = copied("olmoe")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model.safetensors"}}))
    open_checkpoint(path)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(UserError, match=r"holds both model.safetensors and model.safetensors.index.json"):
        open_checkpoint(path)


def test_an_output_layer_beside_the_embedding_that_it_is_tied_to(copied: Callable[[str], Path]) -> None:
    path = copied("olmoe")
    file = path / "model.safetensors"
    tensors = load_file(file)
    configured(path, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"lm_head.weight differs from the embedding"):
        open_checkpoint(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    assert "lm_head.weight" not in open_checkpoint(path).dense


def test_an_index_that_lies(copied: Callable[[str], Path]) -> None:
    path = copied("qwen3")
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    placed = index["weight_map"]
    placed["model.norm.weight"] = next(
        name for name in placed.values() if name != placed["model.norm.weight"]
    )
    file.write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"puts model.norm.weight into .* which does not hold it"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "positions are of type 'yarn'"),
        ({"num_experts_per_tok": 9}, "goes to 9 experts, and there are 8"),
        ({"num_experts": 0}, "experts is 0"),
        ({"hidden_size": "wide"}, "config.json"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"num_hidden_layers": 2**70}, "num_hidden_layers is"),
        ({"vocab_size": float("inf")}, "config.json"),
        ({"rope_parameters": "none"}, "rope_parameters is 'none'"),
        ({"rope_parameters": {"rope_theta": -5.0}}, "theta is -5.0"),
        ({"rms_norm_eps": float("nan")}, "eps is nan"),
    ],
)
def test_a_config_that_is_not_computed_is_refused(
    values: dict[str, Any], said: str, copied: Callable[[str], Path]
) -> None:
    path = copied("olmoe")
    configured(path, **values)
    with pytest.raises(UserError, match=said):
        open_checkpoint(path)


def test_what_a_config_leaves_out_is_said(copied: Callable[[str], Path]) -> None:
    path = copied("olmoe")
    config = json.loads((path / "config.json").read_text())
    del config["num_experts_per_tok"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="it has no num_experts_per_tok"):
        open_checkpoint(path)
    (path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        open_checkpoint(path)


def test_texts_end_where_config_or_generation_config_says(copied: Callable[[str], Path]) -> None:
    path = copied("olmoe")
    configured(path, eos_token_id=[3, 1])
    (path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert architecture.read(path).ends == (1, 3, 7)
    for wrong in ('"end"', '["end", 3]', "[null]"):
        (path / "generation_config.json").write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(UserError, match=r"generation_config.json: eos_token_id"):
            architecture.read(path)


def test_published_shapes_have_their_published_sizes() -> None:
    olmoe, qwen = architecture.named("olmoe-1b-7b"), architecture.named("qwen3-30b-a3b")
    assert 2 * olmoe.expert_parameters == 12_582_912
    assert 2 * qwen.expert_parameters == 9_437_184
    with pytest.raises(UserError, match="did you mean"):
        architecture.named("olmoe-1b-7")
