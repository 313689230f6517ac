"""A tiny Qwen2 base on disk with a tokenizer of its own: what tests of learners stand on."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from coresident.engines.pool.learning import data
from coresident.engines.pool.learning import model as models
from coresident.engines.pool.learning.tokenized import Batch, batches
from coresident.engines.pool.parameters import DPO, Data
from coresident.errors import MachineError, UserError
from coresident.lab.run.machine import devices
from coresident.text import pythondocs, tokenizer

End = Callable[[subprocess.Popen[str]], None]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as `save_pretrained` leaves it: 2 layers of width 32, tied embeddings, float32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    out = tmp_path_factory.mktemp("base")
    size = tokenizer.train_byte_bpe(pythondocs.corpus()[:40], 512, out)
    config = Qwen2Config(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    base = Qwen2ForCausalLM(config)
    # transformers draws weights so small that every token is as likely as any other, which hides mistakes.
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    base.save_pretrained(out)
    return out


@pytest.fixture
def settings() -> DPO:
    """A run of five quick steps."""
    return DPO(steps=5, batch=2, max_length=64, learning_rate=1e-3, rank=4, alpha=8.0)


@pytest.fixture
def tensors(tiny_base: Path) -> Callable[[str], dict[str, torch.Tensor]]:
    """Loads the base's tensors by checkpoint name, in a given dtype."""
    from safetensors.torch import load_file

    def load(dtype: str = "float32") -> dict[str, torch.Tensor]:
        loaded = load_file(tiny_base / "model.safetensors")
        return {name: tensor.to(getattr(torch, dtype)) for name, tensor in loaded.items()}

    return load


@pytest.fixture
def build(tiny_base: Path, tensors: Any) -> Callable[..., Any]:
    """Builds a learner's model, from the given base tensors or a fresh copy of the base's."""

    def built(settings: DPO, given: Mapping[str, torch.Tensor] | None = None) -> Any:
        model = models.build_on_meta(tiny_base, settings)
        models.attach(model, tensors(settings.dtype) if given is None else given, settings)
        return model

    return built


@pytest.fixture
def docs_batches(tiny_base: Path) -> Callable[..., list[Batch]]:
    """A learner's batches of real text."""

    def made(settings: DPO, learner: int = 0) -> list[Batch]:
        shard = data.tokens(
            settings.model_copy(update={"data": Data(pairs=12)}), learner, tokenizer.load(tiny_base)
        )
        return list(batches(shard, settings, learner))

    return made


@pytest.fixture
def disturb() -> Callable[[Any], None]:
    """Makes a zero adapter a trained-looking one, so that policy and reference differ."""

    def moved(model: Any) -> None:
        source = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                if ".lora_B." in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=source))

    return moved


@pytest.fixture(scope="session")
def below() -> Callable[..., list[psutil.Process]]:
    """Finds processes below `driver` (this one) by what their command lines hold, in the order they were started."""

    def found(*held: str, driver: int | None = None) -> list[psutil.Process]:
        those = []
        for process in psutil.Process(driver).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # one that is just ending has no command line to read
                line = " ".join(process.cmdline())
                if all(one in line for one in held):
                    those.append((process.create_time(), process.pid, process))
        return [process for *_, process in sorted(those, key=lambda one: one[:2])]

    return found


@pytest.fixture(scope="session")
def killed() -> End:
    """Kills a driver, and waits until nothing below it is left."""

    def kill(process: subprocess.Popen[str]) -> None:
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        psutil.wait_procs(below, timeout=10)

    return kill


@pytest.fixture(scope="session")
def stopped() -> End:
    """Interrupts a `pool train --json`, which says what it has kept."""

    def stop(process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        result = json.loads(out)
        assert result["stopped"] is True
        assert {one["status"] for one in result["learners"]} <= {"stopped", "done"}

    return stop


@pytest.fixture(scope="session")
def card() -> str:
    """The UUID of the card that `gpu` tests use: the first that CUDA_VISIBLE_DEVICES leaves, which NVML knows nothing of."""
    try:
        return devices.resolve("0")[0].uuid
    except (MachineError, UserError) as error:
        pytest.skip(f"no card: {error}")
