"""What we export, transformers runs; what transformers saved, we read; what we cannot compute, we refuse."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from coresident.errors import MachineError, UserError
from coresident.model.huggingface import export, load
from coresident.model.llama import Llama
from coresident.model.shape import Mixture, ModelShape

Lively = Callable[..., Llama]
Text = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture
def exported(shape: ModelShape, lively: Lively, tmp_path: Path) -> Path:
    """A model's directory, without a tokenizer."""
    export(lively(shape), None, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer's directory: 256 bytes, no merges, one special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    where = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>").save_pretrained(where)
    return where


def _changed(directory: Path, **values: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


CHANGES = [
    {},
    {"tied": False},
    {"eps": 1e-3, "rope_theta": 500.0},
    {"mixture": Mixture(experts=4, top_k=3, width=8, normalise=True, balance=0.02, z=0.003)},
]


def _like(shape: ModelShape, change: dict[str, Any]) -> ModelShape:
    if "mixture" in change and shape.mixture is None:
        pytest.skip("a dense model has no experts")
    return shape.model_copy(update=change)


@pytest.mark.parametrize("change", CHANGES)
def test_transformers_computes_our_logits(
    change: dict[str, Any], shape: ModelShape, lively: Lively, text: Text, tmp_path: Path
) -> None:
    model, (tokens, _) = lively(_like(shape, change)), text(3, 32)
    export(model, None, tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert type(theirs).__name__ == ("OlmoeForCausalLM" if shape.mixture else "LlamaForCausalLM")
    torch.testing.assert_close(
        theirs(tokens).logits, model.logits(model(tokens).hidden), rtol=2e-5, atol=2e-5
    )


def test_transformers_computes_our_gradients(
    shape: ModelShape, lively: Lively, text: Text, exported: Path
) -> None:
    model, (tokens, targets) = lively(shape), text(3, 32)
    loss = model.loss(tokens, targets)
    (loss.cross_entropy / loss.targets).backward()
    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    theirs(tokens, labels=torch.zeros_like(tokens), shift_labels=targets).loss.backward()
    their_layer, layer = theirs.model.layers[0], model.layers[0]
    assert isinstance(model.embedding.grad, Tensor)
    torch.testing.assert_close(
        theirs.model.embed_tokens.weight.grad, model.embedding.grad, rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(
        their_layer.self_attn.k_proj.weight.grad,
        layer.attention.qkv.grad[shape.width : 2 * shape.width],
        rtol=1e-4,
        atol=1e-6,
    )
    if shape.mixture:
        got, wanted = their_layer.mlp.gate.weight.grad, layer.feedforward.router.grad
    else:
        got, wanted = their_layer.mlp.down_proj.weight.grad, layer.feedforward.down.grad
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def test_our_routing_is_transformers(lively: Lively, text: Text, shape: ModelShape, exported: Path) -> None:
    if shape.mixture is None:
        pytest.skip("a dense model has no router")
    model, (tokens, _) = lively(shape), text(3, 32)
    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    chosen: list[Tensor] = []
    for layer in theirs.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _module, _given, made: chosen.append(made[2]))
    theirs(tokens)
    router = model(tokens).router
    assert router is not None
    for got, wanted in zip(router.experts, chosen, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("change", CHANGES)
def test_an_export_read_again_is_the_model(
    change: dict[str, Any], shape: ModelShape, lively: Lively, tmp_path: Path
) -> None:
    model = lively(_like(shape, change))
    export(model, None, tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.shape == model.shape
    for got, wanted in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("absent", ["rope_theta", "rope_parameters"])
def test_positions_are_said_as_readers_of_today_and_of_before_expect(
    absent: str, shape: ModelShape, lively: Lively, tmp_path: Path
) -> None:
    export(lively(shape.model_copy(update={"rope_theta": 500.0})), None, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    kept = json.loads(file.read_text())
    del kept[absent]
    file.write_text(json.dumps(kept))
    assert load(tmp_path / "model").shape.rope_theta == 500


def test_what_transformers_saves_is_read_whole_or_in_shards(
    shape: ModelShape, exported: Path, tmp_path: Path
) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    for name, size in (("whole", "1GB"), ("shards", "10KB")):
        theirs.save_pretrained(tmp_path / name, max_shard_size=size)
        again = load(tmp_path / name)
        for got, wanted in zip(again.parameters(), load(exported).parameters(), strict=True):
            assert torch.equal(got, wanted)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1


def test_the_tokenizer_goes_with_it_and_generation_ends_at_its_end(
    tokenizer: Path, shape: ModelShape, lively: Lively, tmp_path: Path
) -> None:
    model = lively(shape.model_copy(update={"vocabulary": 272}))
    export(model, tokenizer, tmp_path / "model")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    said = "def f(x):\n    return x  # Straße\n"
    given = loaded(said, return_tensors="pt").input_ids
    assert given.tolist() == [AutoTokenizer.from_pretrained(tokenizer)(said).input_ids]
    assert loaded.decode(given[0]) == said
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert theirs.generation_config.eos_token_id == loaded.eos_token_id == 256
    made = theirs.generate(given[:, :4], max_new_tokens=6)
    wanted = given[:, :4]
    while wanted.shape[1] < made.shape[1]:
        wanted = torch.cat((wanted, model.logits(model(wanted).hidden)[:, -1:].argmax(-1)), 1)
    assert torch.equal(made, wanted)


def test_a_tokenizer_larger_than_the_model_is_refused(
    tokenizer: Path, shape: ModelShape, lively: Lively, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="has 257 tokens, and the model only 61"):
        export(lively(shape), tokenizer, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_a_tokenizer_is_refused(
    shape: ModelShape, lively: Lively, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"the tokenizer in .*empty cannot be loaded"):
        export(lively(shape), tmp_path / "empty", tmp_path / "model")


def test_nothing_is_written_over(shape: ModelShape, lively: Lively, exported: Path) -> None:
    with pytest.raises(UserError, match="is already there; remove it"):
        export(lively(shape), None, exported)


def test_a_failed_export_leaves_nothing(
    shape: ModelShape, lively: Lively, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("coresident.model.huggingface.save_file", full)
    with pytest.raises(MachineError, match=r"cannot be written to .*model: .*No space left"):
        export(lively(shape), None, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_what_killed_exports_left_is_removed_and_what_others_write_is_not(
    shape: ModelShape, lively: Lively, tmp_path: Path
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    killed, reused, running, others = (
        tmp_path / name
        for name in (
            f".model.aside-{ended.pid}",
            f".model.aside-{os.getpid()}",
            f".model.aside-{os.getppid()}",
            f".model2.aside-{ended.pid}",
        )
    )
    for left in (killed, reused, running, others):
        left.mkdir()
        (left / "model.safetensors").write_bytes(b"half")
    export(lively(shape), None, tmp_path / "model")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "model", running, others])


def test_whoever_may_read_one_file_may_read_all(exported: Path) -> None:
    assert len({one.stat().st_mode for one in exported.iterdir()}) == 1


@pytest.mark.parametrize(
    "change", [{"qk_norm": True}, {"feedforward": None, "mixture": Mixture(experts=4, top_k=1, width=8)}]
)
def test_a_model_that_transformers_has_not_is_not_exported(change: dict[str, Any], tmp_path: Path) -> None:
    shape = ModelShape(**{"vocabulary": 61, "layers": 1, "width": 24, "heads": 2, "feedforward": 40} | change)
    with pytest.raises(UserError, match="transformers has no such model"):
        export(Llama(shape), None, tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "qwen2"}, "model_type is 'qwen2'"),
        ({"num_key_value_heads": 1}, "fewer key heads than query heads"),
        ({"head_dim": 16}, "not the width split evenly"),
        ({"attention_bias": True}, "attention_bias is True, and only False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "positions are of type 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling is"),
        ({"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ({"vocab_size": "61"}, "vocabulary: Input should be a valid integer"),
        ({"num_attention_heads": 5}, "not divisible by 5 heads|fewer key heads"),
    ],
)
def test_a_config_that_we_do_not_compute_is_refused_by_name(
    change: dict[str, Any], said: str, exported: Path
) -> None:
    _changed(exported, **change)
    with pytest.raises(UserError, match=rf"config\.json: .*({said})"):
        load(exported)


def test_a_config_without_a_size_is_refused_by_name(exported: Path) -> None:
    kept = json.loads((exported / "config.json").read_text())
    del kept["hidden_size"]
    (exported / "config.json").write_text(json.dumps(kept))
    with pytest.raises(UserError, match=r"config\.json: it has no hidden_size"):
        load(exported)


@pytest.mark.parametrize("content", ["", "[]", "{", "\udcff"])
def test_a_config_that_is_no_config_is_refused(content: str, exported: Path) -> None:
    (exported / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"config\.json"):
        load(exported)


@pytest.mark.parametrize("fault", ["missing", "extra", "misshapen", "whole numbers"])
def test_weights_that_do_not_fit_the_config_are_refused_by_name(
    fault: str, shape: ModelShape, exported: Path
) -> None:
    file, name = exported / "model.safetensors", "model.layers.1.self_attn.q_proj.weight"
    stored = load_file(file)
    kept = stored.pop(name)
    if fault == "extra":
        stored |= {name: kept, "model.layers.1.self_attn.q_proj.bias": kept[0].clone()}
    elif fault == "misshapen":
        stored[name] = kept[:-1].clone()
    elif fault == "whole numbers":
        stored[name] = kept.to(torch.int8)
    save_file(stored, file, metadata={"format": "pt"})
    said = {
        "missing": f"1 tensors are missing, {name}",
        "extra": "q_proj.bias has no place",
        "misshapen": rf"{name} is torch.float32 \[23, 24\], and config.json says floats \[24, 24\]",
        "whole numbers": f"{name} is torch.int8",
    }
    with pytest.raises(UserError, match=said[fault]):
        load(exported)


def test_cut_or_absent_weights_are_refused(exported: Path) -> None:
    file = exported / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        load(exported)
    file.unlink()
    with pytest.raises(UserError, match=r"model\.safetensors does not exist"):
        load(exported)


def test_an_index_that_points_elsewhere_is_refused(exported: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (exported / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="names no files beside it"):
        load(exported)
