"""4-bit bases are written once, the same bytes each time, from a float base or as a named shape."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from coresident.engines.pool.base import base, loading, shapes
from coresident.engines.pool.parameters import BaseModelChoice
from coresident.engines.pool.quantised import checkpoint, nf4, sizes, writer
from coresident.errors import MachineError, UserError

UP = "model.layers.1.mlp.up_proj"


def digests(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()}


def dequantised(directory: Path, layer: str) -> torch.Tensor:
    described = base.read(directory)
    held = loading.private(described, "float32")
    form = checkpoint.forms(described.tensors)[layer]
    parts = {part: held[f"{layer}.weight" + ("" if part == "weight" else f".{part}")] for part in form.sizes}
    return nf4.dequantise(nf4.Quantised(form, **parts), torch.float32)


def test_a_float_base_is_quantised_layer_by_layer(tiny_base: Path, tmp_path: Path) -> None:
    writer.write_from(tiny_base, tmp_path / "nf4")
    before, after = base.read(tiny_base), base.read(tmp_path / "nf4")
    floats = loading.private(before, "float32")
    held = loading.private(after, "float32")
    layers = checkpoint.forms(after.tensors)
    assert len(layers) == 14
    for layer in layers:
        weight = floats[f"{layer}.weight"]
        error = (dequantised(tmp_path / "nf4", layer) - weight).square().mean().sqrt() / weight.std()
        # The error of NF4 on normal numbers (Dettmers et al., 2023: about 0.1 of their deviation).
        assert 0.05 < error < 0.13
    for name, tensor in floats.items():
        if name.removesuffix(".weight") not in layers:
            assert torch.equal(held[name], tensor)
    assert after.config["quantization_config"]["bnb_4bit_quant_type"] == "nf4"
    assert (tmp_path / "nf4" / "tokenizer.json").is_file()


def test_the_same_base_gives_the_same_bytes(tiny_base: Path, tmp_path: Path) -> None:
    for number, threads in enumerate((1, 2)):
        torch.set_num_threads(threads)
        writer.write_from(tiny_base, tmp_path / str(number))
    assert digests(tmp_path / "0") == digests(tmp_path / "1")


def test_a_named_shape_is_drawn_in_4_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.write_named("tiny", "bfloat16", 3, tmp_path / "one")
    monkeypatch.setattr(writer.writer, "THREADS", 1)
    writer.write_named("tiny", "bfloat16", 3, tmp_path / "same")
    writer.write_named("tiny", "bfloat16", 4, tmp_path / "other")
    assert digests(tmp_path / "one") == digests(tmp_path / "same")
    assert digests(tmp_path / "one") != digests(tmp_path / "other")
    assert dequantised(tmp_path / "one", UP).std() == pytest.approx(writer.DEVIATION, rel=0.1)
    assert abs(float(dequantised(tmp_path / "one", UP).mean())) < 0.002


def test_shards_and_their_index(tmp_path: Path) -> None:
    writer.write_named("tiny", "float32", 0, tmp_path / "whole")
    writer.write_named("tiny", "float32", 0, tmp_path / "parts", shard=100_000)
    assert len(list((tmp_path / "parts").glob("model-*-of-*.safetensors"))) >= 2
    whole, parts = (loading.private(base.read(tmp_path / name), "float32") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())


@pytest.mark.parametrize("shape", ["tiny", "small"])
def test_sizes_are_foretold(tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(base.CACHE, str(tmp_path))
    choice = BaseModelChoice(config=shape, quantise="nf4")  # type: ignore[arg-type]
    foretold = base.estimate(choice, "bfloat16")
    writer.write_named(shape, "bfloat16", 0, base.location(choice, "bfloat16"))
    assert base.estimate(choice, "bfloat16") == foretold
    assert foretold < base.estimate(BaseModelChoice(config=shape), "bfloat16")  # type: ignore[arg-type]


def test_the_7b_shape_takes_5_gib() -> None:
    """Its decoder in 4.127 bits a weight, and the two tables of 152,064 words in bfloat16."""
    size = base.estimate(BaseModelChoice(config="qwen2.5-7b", quantise="nf4"), "bfloat16")
    weights = list(shapes.weights(shapes.SHAPES["qwen2.5-7b"]))
    decoder = sum(one.elements for one in weights if sizes.quantisable(one.name, one.shape))
    tables = 2 * 152064 * 3584 * 2
    assert size == pytest.approx(decoder * 4.127 / 8 + tables, rel=1e-3)
    assert 5.0 < size / 2**30 < 5.2


def test_a_changed_base_is_quantised_anew(tiny_base: Path, tmp_path: Path) -> None:
    import shutil

    given = tmp_path / "base"
    shutil.copytree(tiny_base, given)
    choice = BaseModelChoice(path=str(given), quantise="nf4")
    first = base.location(choice, "float32")
    (given / "model.safetensors").touch()
    assert base.location(choice, "float32") != first


def test_what_cannot_be_quantised_says_so(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(base.CACHE, str(tmp_path))
    with pytest.raises(UserError, match="is not a directory"):
        base.ensure(BaseModelChoice(path=str(tmp_path / "nowhere"), quantise="nf4"), "float32")
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(tiny_base, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "nothing"}))
    with pytest.raises(MachineError, match=r"could not be written.*cannot be used"):
        base.ensure(BaseModelChoice(path=str(broken), quantise="nf4"), "float32")
    assert not list((tmp_path / "bases").glob("broken*[!k]"))
