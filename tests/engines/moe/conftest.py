"""Routing that is made, not recorded: drifting router logits, so that consecutive tokens share experts as real ones do; and a
tiny OLMoE with a tokenizer, exported by our own model code.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coresident.engines.moe.traces.manifest import Router, Sampling
from coresident.engines.moe.traces.traces import Trace, Traces

Make = Callable[..., Traces]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny products; and the machine's other cores run other tests."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def interpreted() -> Callable[..., Any]:
    """`interpreted(script, *arguments)`: the JSON that a script prints where Triton interprets kernels on the CPU."""
    pytest.importorskip("triton")

    def run(script: Path, *arguments: str) -> Any:
        ran = subprocess.run(
            [sys.executable, str(script), *arguments],
            env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        return json.loads(ran.stdout)

    return run


@pytest.fixture
def no_direct_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a filesystem that refuses O_DIRECT."""
    opened = os.open

    def refused(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", refused)


def _made(
    prompts: int = 8,
    steps: int = 24,
    layers: int = 4,
    experts: int = 16,
    k: int = 3,
    prefill: int = 5,
    seed: int = 0,
    identity: str = "0" * 64,
) -> Traces:
    source = np.random.default_rng(seed)
    kept = []
    for number in range(prompts):
        rows = steps + prefill
        shape = (rows, layers, experts)
        logits = source.normal(size=shape[1:]) + 0.3 * source.normal(size=shape).cumsum(axis=0)
        logits = (logits + 0.5 * source.normal(size=shape)).astype(np.float32)
        chosen = np.argsort(-logits, axis=-1, kind="stable")[..., :k].astype(np.uint8)
        kept.append(
            Trace(
                f"prompt-{number:03}",
                ("code", "prose")[number % 2],
                "fit" if number // 2 % 2 == 0 else "held-out",
                prefill,
                source.integers(0, 1000, rows).astype(np.int32),
                chosen,
                logits,
            )
        )
    model = Router(
        identity=identity,
        architecture="olmoe",
        layers=tuple(range(layers)),
        experts=experts,
        top_k=k,
        normalise=False,
    )
    return Traces(model, Sampling(max_tokens=steps, temperature=0.0, seed=0, by="made"), tuple(kept))


@pytest.fixture
def made() -> Make:
    """Makes traces of two families, half of the prompts held out."""
    return _made


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of an untrained OLMoE: 4 layers of 8 experts, 2 a token, context 96, with a tokenizer."""
    from coresident.model import huggingface
    from coresident.model.initial import initialise
    from coresident.model.llama import Llama
    from coresident.model.shape import Mixture, ModelShape
    from coresident.text import pythondocs
    from coresident.text.tokenizer import train_byte_bpe

    place = tmp_path_factory.mktemp("tiny-moe")
    train_byte_bpe(pythondocs.corpus()[:20], 320, place / "words")
    shape = ModelShape(
        vocabulary=320,
        layers=4,
        width=32,
        heads=2,
        context=96,
        qk_norm=True,
        mixture=Mixture(experts=8, top_k=2, width=24),
    )
    model = Llama(shape)
    initialise(model, 0)
    huggingface.export(model, place / "words", place / "model")
    return place / "model"


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Random models that transformers made and saved, by name: small, and with every weight large enough to matter.

    `olmoe`: 3 layers of 8 experts, 2 a token. `stacked`: the same, saved with experts stacked. `qwen3`: 3 a token, grouped key
    heads, normalised weights, a dense layer among the sparse, in many shards. `ours`: one that our own code trained and exported.
    """
    import torch
    from transformers import OlmoeConfig, OlmoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    place = tmp_path_factory.mktemp("saved")
    common = {
        "vocab_size": 200,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_experts": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "eos_token_id": None,
        "pad_token_id": None,
    }

    def make(name: str) -> Path:
        out = place / name
        if out.exists():
            return out
        torch.manual_seed(0)
        if name == "ours":
            return _trained(out)
        if name == "qwen3":
            qwen = Qwen3MoeConfig(
                **common,
                intermediate_size=80,
                moe_intermediate_size=96,
                num_hidden_layers=4,
                num_key_value_heads=2,
                head_dim=24,
                num_experts_per_tok=3,
                norm_topk_prob=True,
                mlp_only_layers=[1],
            )
            model = Qwen3MoeForCausalLM(qwen)
        else:
            olmoe = OlmoeConfig(
                **common,
                intermediate_size=96,
                num_hidden_layers=3,
                num_key_value_heads=4,
                num_experts_per_tok=2,
            )
            model = OlmoeForCausalLM(olmoe)
        with torch.no_grad():
            for named, weight in model.named_parameters():
                if weight.ndim == 1:
                    # Norms that differ from one another, so that one taken for another is seen.
                    weight.add_(
                        0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(named)))
                    )
        more = {"max_shard_size": "200KB"} if name == "qwen3" else {}
        model.save_pretrained(out, save_original_format=name != "stacked", **more)
        return out

    return make


def _trained(out: Path) -> Path:
    """Sixty updates on sequences that count upwards in steps of one to four."""
    import torch

    from coresident.model import huggingface
    from coresident.model.initial import initialise
    from coresident.model.llama import Llama
    from coresident.model.shape import Mixture, ModelShape

    shape = ModelShape(
        vocabulary=200,
        layers=3,
        width=64,
        heads=4,
        context=512,
        qk_norm=True,
        mixture=Mixture(experts=8, top_k=2, width=96),
    )
    model = initialise(Llama(shape), 0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        start, step = torch.randint(0, 200, (16, 1)), torch.randint(1, 5, (16, 1))
        rows = (start + step * torch.arange(25)) % 200
        loss = model.loss(rows[:, :-1], rows[:, 1:])
        optimiser.zero_grad()
        (loss.cross_entropy / loss.targets + loss.auxiliary).backward()
        optimiser.step()
    huggingface.export(model, None, out)
    return out
