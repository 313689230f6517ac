"""4-bit bases in files: what transformers saves with bitsandbytes is read, and what is anything else is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pool.base import base, loading
from coresident.engines.pool.base import writer as float_writer
from coresident.engines.pool.learning import model as models
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.quantised import checkpoint, names, nf4, writer
from coresident.engines.pool.quantised.linear import NF4Linear
from coresident.errors import UserError

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def in_4_bits(tiny_base: Path, tmp_path: Path) -> Path:
    writer.write_from(tiny_base, tmp_path / "nf4")
    return tmp_path / "nf4"


def edited(directory: Path, edit: Edit) -> Path:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    edit(config["quantization_config"])
    file.write_text(json.dumps(config))
    return directory


def rewritten(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quant_method": "gptq"}, "quantised by gptq, and only bitsandbytes' NF4"),
        ({"quant_method": "awq"}, "quantised by awq"),
        ({"load_in_4bit": False, "_load_in_4bit": False, "load_in_8bit": True}, "quantised to 8 bits"),
        ({"bnb_4bit_quant_type": "fp4"}, "a 4-bit model of type fp4"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "a 4-bit model that is stored as bfloat16"),
    ],
)
def test_other_formats_are_refused(in_4_bits: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        base.read(edited(in_4_bits, lambda config: config.update(changes)))
    assert str(in_4_bits / "config.json") in str(caught.value)
    assert "use the checkpoint" in caught.value.remedy or "save it" in caught.value.remedy


STATE = "model.layers.0.mlp.up_proj.weight"


def told(**changes: Any) -> torch.Tensor:
    text = {
        "quant_type": "nf4",
        "blocksize": 64,
        "shape": [64, 32],
        "nested_blocksize": 256,
        "nested_offset": 0.1,
    }
    return torch.frombuffer(bytearray(json.dumps(text | changes).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        (names.STATE, torch.zeros(3, dtype=torch.uint8), "describes no 4-bit weight"),
        (names.STATE, told(quant_type="fp4"), "says fp4 in blocks of 64"),
        (names.STATE, told(blocksize=7), "in blocks of 7"),
        (names.STATE, told(shape=[64, 64]), "where uint8 "),
        (".absmax", None, r"up_proj.weight.absmax is missing, where uint8 \[32\] belongs"),
        (".nested_absmax", torch.zeros(2), "is float32 "),
        ("", torch.zeros(1024, 1), "is float32 "),
    ],
)
def test_a_state_that_does_not_fit_is_refused(in_4_bits: Path, part: str, value: Any, said: str) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[STATE + part]
        if value is not None:
            tensors[STATE + part] = value

    with pytest.raises(UserError, match=said):
        models.build_on_meta(rewritten(in_4_bits, edit), DPO())


def test_fp4_weights_behind_an_nf4_config_are_refused(in_4_bits: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{STATE}.quant_state.bitsandbytes__fp4"] = tensors.pop(STATE + names.STATE)

    with pytest.raises(UserError, match="fp4, and only nf4 weights"):
        models.build_on_meta(rewritten(in_4_bits, edit), DPO())


def test_a_weight_of_a_layer_that_is_not_there_is_refused(in_4_bits: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(STATE)]:
            tensors[name.replace("layers.0", "layers.7")] = tensors[name].clone()

    with pytest.raises(UserError, match=r"layers.7.mlp.up_proj in NF4, and .* it is not there"):
        models.build_on_meta(rewritten(in_4_bits, edit), DPO())


def test_one_that_is_in_4_bits_already_is_used_as_it_is(in_4_bits: Path) -> None:
    for quantise in ("none", "nf4"):
        choice = DPO.model_validate({"base": {"path": str(in_4_bits), "quantise": quantise}}).base
        assert base.location(choice, "float32") == in_4_bits


def test_scales_stay_float32_whatever_the_run_is_in(in_4_bits: Path) -> None:
    directory = base.read(in_4_bits)
    assert directory.dtype == "float32"
    held = loading.private(directory, "bfloat16")
    kinds = {name.rpartition(".weight")[2]: tensor.dtype for name, tensor in held.items() if STATE in name}
    assert kinds == {
        "": torch.uint8,
        ".absmax": torch.uint8,
        ".quant_map": torch.float32,
        ".nested_absmax": torch.float32,
        ".nested_quant_map": torch.float32,
        names.STATE: torch.uint8,
    }
    assert held["model.norm.weight"].dtype == torch.bfloat16


@pytest.fixture
def wide_base(tmp_path: Path) -> Path:
    """Rows of 64 numbers at least: bitsandbytes' CPU kernel goes wrong where a block is longer than a row."""
    float_writer.write("tiny", "float32", 0, tmp_path / "wide")
    return tmp_path / "wide"


def same_weights(theirs: Any, directory: Path) -> int:
    """How many layers our model over `directory` and theirs have in 4 bits, after seeing that all weights are equal."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    settings = DPO(rank=4)
    ours = models.build_on_meta(directory, settings)
    models.attach(ours, loading.private(base.read(directory), "float32"), settings)
    plain = ours.get_base_model()
    layers = {name: layer for name, layer in theirs.named_modules() if isinstance(layer, Linear4bit)}
    for name, layer in layers.items():
        mine = plain.get_submodule(name).base_layer
        assert isinstance(mine, NF4Linear)
        expected = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        assert torch.equal(mine.dequantised(torch.float32), expected.reshape(mine.form.shape))
    with torch.no_grad():
        assert torch.isfinite(ours(torch.arange(40).view(2, 20)).logits).all()
    return len(layers)


@pytest.mark.parametrize("double", [True, False])
def test_what_bitsandbytes_quantised_and_transformers_saved(
    wide_base: Path, tmp_path: Path, double: bool
) -> None:
    """The one direction: their checkpoint in our pool."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double)
    theirs = AutoModelForCausalLM.from_pretrained(wide_base, quantization_config=asked, dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    for file in wide_base.glob("tokenizer*"):
        shutil.copyfile(file, tmp_path / "theirs" / file.name)
    assert same_weights(theirs, tmp_path / "theirs") == 14


def test_bitsandbytes_reads_what_was_quantised_here(wide_base: Path, tmp_path: Path) -> None:
    """The other direction: our checkpoint in transformers."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM

    writer.write_from(wide_base, tmp_path / "nf4")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "nf4", dtype=torch.float32)
    assert same_weights(theirs, tmp_path / "nf4") == 14


def test_the_state_as_json() -> None:
    form = nf4.Form((4, 64), 64, 0.25, 256)
    assert json.loads(checkpoint.state(form, "bfloat16")) == {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": [4, 64],
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": 0.25,
    }
