"""A base is a local directory or a named shape; whatever keeps a directory from being one is said, with a
remedy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from coresident.engines.pool.base import base
from coresident.engines.pool.parameters import BaseModelChoice
from coresident.errors import UserError


@pytest.fixture
def directory(tiny_base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_base, tmp_path / "base"))


def shard(directory: Path) -> None:
    """Split the weights in two, as `save_pretrained` does for large models."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, directory / file)
    placed = {name: file for file, members in parts.items() for name in members}
    (directory / base.INDEX).write_text(json.dumps({"weight_map": placed}))
    (directory / "model.safetensors").unlink()


def test_a_directory_is_read_with_its_type_and_size(directory: Path) -> None:
    found = base.read(directory)
    assert found.dtype == "float32"
    assert sum(tensor.size for tensor in found.tensors) <= found.bytes("float32")
    assert found.bytes("bfloat16") < found.bytes("float32") < found.bytes("float64")


def test_a_sharded_directory_holds_the_same_tensors(directory: Path) -> None:
    whole = {(tensor.name, tensor.dtype, tensor.shape) for tensor in base.read(directory).tensors}
    shard(directory)
    assert {(tensor.name, tensor.dtype, tensor.shape) for tensor in base.read(directory).tensors} == whole


def _without(*names: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        for name in names:
            (directory / name).unlink()

    return damage


def _only_bin(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def _missing_shard(directory: Path) -> None:
    shard(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()


def _misplaced(directory: Path) -> None:
    shard(directory)
    index = json.loads((directory / base.INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "model-00001-of-00002.safetensors")
    (directory / base.INDEX).write_text(json.dumps(index))


def _torn(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _encoder(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"}))


def _quantised(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {"bits": 4}}))


@pytest.mark.parametrize(
    ("damage", "said", "remedy"),
    [
        (shutil.rmtree, "is not a directory", "already downloaded"),
        (_without("model.safetensors"), "has no weights", "fully downloaded"),
        (_only_bin, "only as pytorch_model.bin", "convert them"),
        (_missing_shard, "names the shard model-00002-of-00002.safetensors", "fetch the missing shard"),
        (_misplaced, "which does not hold it", "fetch that shard again"),
        (_torn, "model.safetensors is torn", "again"),
        (_without("tokenizer.json"), "has no tokenizer", "save_pretrained"),
        (_without("config.json"), "has no config.json", "Hugging Face"),
        (lambda directory: (directory / "config.json").write_text("{"), "cannot be read as JSON", "again"),
        (_encoder, "['BertModel'], which is no causal language model", "ForCausalLM"),
        (_quantised, "quantised", "float32"),
    ],
)
def test_what_is_wrong_with_a_directory_is_said(
    directory: Path, damage: Callable[[Path], object], said: str, remedy: str
) -> None:
    damage(directory)
    with pytest.raises(UserError) as caught:
        base.read(directory)
    assert said in caught.value.problem
    assert str(directory) in caught.value.problem
    assert remedy in caught.value.remedy


def test_a_named_base_has_its_seed_and_type_in_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(base.CACHE, str(tmp_path))
    places = {
        base.location(BaseModelChoice(config="tiny", seed=seed), dtype)
        for seed in (0, 1)
        for dtype in ("float32", "bfloat16")
    }
    assert len(places) == 4
    assert all(tmp_path in place.parents for place in places)


def test_the_size_of_a_named_base_is_known_without_writing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(base.CACHE, str(tmp_path))
    choice = BaseModelChoice(config="tiny")
    estimate = base.estimate(choice, "float32")
    assert list(tmp_path.iterdir()) == []
    written = base.ensure(choice, "float32")
    assert estimate == sum(tensor.size for tensor in written.tensors)
