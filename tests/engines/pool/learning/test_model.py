"""The model of a learner: built without a number, attached without a copy, and then exactly what transformers
loads.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pool.learning import model as models
from coresident.engines.pool.parameters import DPO
from coresident.errors import InternalError, UserError


def _loaded(base: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, local_files_only=True, **options).eval()


def test_the_skeleton_holds_no_number(tiny_base: Path, settings: DPO) -> None:
    model = models.build_on_meta(tiny_base, settings)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_building_starts_no_thread_and_imports_no_bitsandbytes(tiny_base: Path, tmp_path: Path) -> None:
    """A process that forks has computed nothing: no pool of threads and no device context survives a fork."""
    script = f"""
import sys
from pathlib import Path
from coresident.engines.pool.learning.model import build_on_meta
from coresident.engines.pool.parameters import DPO
build_on_meta(Path({str(tiny_base)!r}), DPO())
import torch
threads = len(list(Path("/proc/self/task").iterdir()))
print(threads, torch.cuda.is_initialized(), "bitsandbytes" in sys.modules)
"""
    # An installed bitsandbytes: PEFT imports it as soon as it builds a LoRA layer, unless it is kept from it.
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path),
        # numpy's and scipy's OpenBLAS start threads on import (and look after them on a fork).
        "OPENBLAS_NUM_THREADS": "1",
    }
    argv = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "False", "False"]


def test_base_tensors_are_used_where_they_lie_and_frozen(build: Any, settings: DPO, tensors: Any) -> None:
    given = tensors()
    used = models.base_tensors(build(settings, given))
    assert {name: tensor.data_ptr() for name, tensor in used.items()} == {
        name: tensor.data_ptr() for name, tensor in given.items()
    }
    assert not any(tensor.requires_grad for tensor in used.values())


def test_only_the_adapter_trains(build: Any, settings: DPO) -> None:
    trained = [name for name, value in build(settings).named_parameters() if value.requires_grad]
    assert len(trained) == 2 * 2 * len(settings.targets)
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_with_a_zero_adapter_logits_and_buffers_are_transformers_own(
    build: Any, tiny_base: Path, settings: DPO, dtype: str
) -> None:
    model = build(settings.model_copy(update={"dtype": dtype}))
    theirs = _loaded(tiny_base, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    ids = torch.arange(20).view(2, 10)
    assert torch.equal(model(input_ids=ids).logits, theirs(input_ids=ids).logits)
    ours, expected = dict(model.get_base_model().named_buffers()), dict(theirs.named_buffers())
    assert ours.keys() == expected.keys()
    for name, buffer in expected.items():
        assert torch.equal(ours[name], buffer)
        assert ours[name].dtype == buffer.dtype


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
SCALED = {"factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}


def _family(name: str) -> Any:
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    torch.manual_seed(1)
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    if name == "llama3":
        rope: dict[str, Any] = {
            "rope_type": "llama3",
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            **SCALED,
        }
        return LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=rope))
    if name == "yarn":
        rope = {"rope_type": "yarn", **SCALED}
        return Qwen2ForCausalLM(Qwen2Config(**SMALL, num_key_value_heads=2, rope_parameters=rope))
    return Qwen2ForCausalLM(Qwen2Config(**SMALL, num_key_value_heads=2, tie_word_embeddings=False))


@pytest.mark.parametrize("family", ["llama3", "gpt2", "yarn", "untied"])
def test_other_families_are_attached_as_transformers_loads_them(
    tmp_path: Path, settings: DPO, family: str
) -> None:
    from safetensors.torch import load_file

    _family(family).save_pretrained(tmp_path)
    targets = ("c_attn",) if family == "gpt2" else ("q_proj", "down_proj")
    settings = settings.model_copy(update={"targets": targets})
    model = models.build_on_meta(tmp_path, settings)
    models.attach(model, load_file(tmp_path / "model.safetensors"), settings)
    ids = torch.arange(40).view(2, 20)
    assert torch.equal(model(input_ids=ids).logits, _loaded(tmp_path)(input_ids=ids).logits)


def test_tied_embeddings_are_one_tensor(build: Any, settings: DPO) -> None:
    base = build(settings).get_base_model()
    assert base.lm_head.weight is base.model.embed_tokens.weight


def test_a_file_with_another_head_is_believed_over_a_tie_in_the_configuration(
    build: Any, settings: DPO, tensors: Any
) -> None:
    given = tensors()
    given["lm_head.weight"] = given["model.embed_tokens.weight"] + 1.0
    base = build(settings, given).get_base_model()
    assert base.lm_head.weight.data_ptr() == given["lm_head.weight"].data_ptr()
    given["lm_head.weight"] = given["model.embed_tokens.weight"].clone()
    base = build(settings, given).get_base_model()
    assert base.lm_head.weight is base.model.embed_tokens.weight


def test_the_adapter_starts_as_pefts_from_the_seed_alone(build: Any, settings: DPO) -> None:
    first, again = (dict(build(settings).named_parameters()) for _ in range(2))
    other = dict(build(settings.model_copy(update={"seed": 43})).named_parameters())
    for name, value in first.items():
        if ".lora_A." in name:
            # kaiming uniform with a = sqrt 5 is uniform up to 1 / sqrt(inputs)
            limit = value.shape[1] ** -0.5
            assert 0.9 * limit < value.abs().max().item() <= limit
            assert torch.equal(value, again[name])
            assert not torch.equal(value, other[name])
        elif ".lora_B." in name:
            assert not value.any()


@pytest.mark.parametrize(
    ("base", "adapter"), [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]
)
def test_the_adapter_is_float32_except_on_a_float64_base(
    build: Any, settings: DPO, base: str, adapter: str
) -> None:
    model = build(settings.model_copy(update={"dtype": base}))
    dtypes = {value.dtype for value in model.parameters() if value.requires_grad}
    assert dtypes == {getattr(torch, adapter)}


def test_dropout_is_off(build: Any, settings: DPO) -> None:
    assert not any(module.training for module in build(settings).modules())


def test_an_unknown_target_is_named_with_the_nearest(tiny_base: Path, settings: DPO) -> None:
    with pytest.raises(UserError) as caught:
        models.build_on_meta(tiny_base, settings.model_copy(update={"targets": ("q_proj", "k_porj")}))
    assert "'k_porj'" in caught.value.problem
    assert "k_proj" in caught.value.remedy


def test_missing_misshapen_and_miscast_tensors_are_named(build: Any, settings: DPO, tensors: Any) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    given = tensors()
    del given[name]
    with pytest.raises(UserError, match=name):
        build(settings, given)
    with pytest.raises(UserError, match=r"\[3, 3\]"):
        build(settings, given | {name: torch.zeros(3, 3)})
    with pytest.raises(InternalError, match=name):
        build(settings, given | {name: torch.zeros(64, 32, dtype=torch.float16)})


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path, tiny_base: Path, settings: DPO) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        models.build_on_meta(tmp_path, settings)
    shutil.copy(tiny_base / "config.json", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "no-such-model"}))
    with pytest.raises(UserError, match=r"config\.json cannot be used"):
        models.build_on_meta(tmp_path, settings)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be used"):
        models.build_on_meta(tmp_path, settings)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(UserError, match="no causal language model"):
        models.build_on_meta(tmp_path, settings)
