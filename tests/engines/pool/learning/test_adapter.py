"""An exported adapter is what PEFT loads, whole or absent, and its digest is of what was learned."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pool.learning.adapter import adapter_tensors, digest, export
from coresident.engines.pool.learning.learner import Learner, NonFinite
from coresident.engines.pool.parameters import DPO
from coresident.errors import MachineError, UserError


@pytest.fixture
def trained(build: Any, settings: DPO, docs_batches: Any) -> Any:
    model = build(settings)
    learner = Learner(model, docs_batches(settings), settings)
    for _ in range(settings.steps):
        learner.step()
    return model


def test_peft_loads_it_and_computes_the_same(trained: Any, tiny_base: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    export(trained, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny_base, local_files_only=True).eval()
    ids = torch.arange(30).view(2, 15)
    with torch.no_grad():
        plain = base(input_ids=ids).logits
        loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(input_ids=ids).logits
        ours = trained(input_ids=ids).logits
    assert torch.equal(loaded, ours)
    assert not torch.allclose(loaded, plain)


def test_the_files_are_pefts(trained: Any, settings: DPO, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    export(trained, tmp_path / "adapter")
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert len(names) == 2 * 2 * len(settings.targets)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"], config["r"], config["lora_alpha"]) == (
        "LORA",
        "CAUSAL_LM",
        4,
        8,
    )
    assert config["target_modules"] == sorted(settings.targets)


def test_the_digest_is_of_names_shapes_and_bytes(trained: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    given = export(trained, tmp_path / "adapter")
    assert given == digest(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    one = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    assert digest(one) == digest(dict(reversed(one.items())))
    others = [
        {"a": torch.tensor([1.0, 2.0]), "c": torch.tensor([3.0])},
        {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])},
        {"a": torch.tensor([1.0]), "b": torch.tensor([2.0, 3.0])},
        {"a": torch.tensor([1.0, math.nextafter(2.0, 3.0)], dtype=torch.float64), "b": torch.tensor([3.0])},
        {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([-3.0])},
    ]
    assert len({digest(one), *map(digest, others)}) == 1 + len(others)


def test_the_files_of_one_adapter_are_equal_byte_for_byte(trained: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        export(trained, tmp_path / name)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_adapter_that_is_not_finite_is_refused(trained: Any, tmp_path: Path, value: float) -> None:
    with torch.no_grad():
        trained.get_submodule("base_model.model.model.layers.1.mlp.up_proj.lora_B.default").weight[0, 0] = (
            value
        )
    with pytest.raises(NonFinite, match=r"layers\.1\.mlp\.up_proj\.lora_B\.weight"):
        export(trained, tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_overwritten(trained: Any, tmp_path: Path) -> None:
    export(trained, tmp_path / "adapter")
    before = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    with pytest.raises(UserError, match="exists already"):
        export(trained, tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == before


def test_a_disk_that_fills_leaves_nothing_half_written(trained: Any, tmp_path: Path) -> None:
    """A real limit on file size stands in for a full disk: the kernel refuses the write in the middle of the
    file.
    """
    import resource
    import signal

    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
            export(trained, tmp_path / "adapter")
        except MachineError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert list(tmp_path.iterdir()) == []


def test_tensors_are_named_in_order(trained: Any) -> None:
    assert list(adapter_tensors(trained)) == sorted(adapter_tensors(trained))
