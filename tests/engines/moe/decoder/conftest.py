"""Decoders of the saved models with any budget, tier and policy; and what transformers says of the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coresident.engines.moe import assemble
from coresident.engines.moe.assemble import Engine
from coresident.engines.moe.parameters import Decode

Build = Callable[..., Engine]


@pytest.fixture
def build(saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """`build(name, batch=1, context=400, **parameters)`: an engine on the CPU, closed afterwards."""
    monkeypatch.setenv("CORESIDENT_CACHE", str(tmp_path / "cache"))
    opened: list[Engine] = []

    def built(name: str, batch: int = 1, context: int = 400, **given: Any) -> Engine:
        model = {"path": str(saved(name))}
        asked = Decode.model_validate({"model": model, **given})
        origin = assemble.open_model(asked.model)
        opened.append(assemble.build(asked, origin, torch.device("cpu"), context, batch))
        return opened[-1]

    yield built
    for engine in opened:
        engine.close()


@pytest.fixture(scope="session")
def theirs(saved: Callable[[str], Path]) -> Callable[[str, list[int]], Tensor]:
    """What transformers scores after each token: [T, V] in float32."""
    from transformers import AutoModelForCausalLM

    loaded: dict[str, Any] = {}

    def logits(name: str, tokens: list[int]) -> Tensor:
        if name not in loaded:
            loaded[name] = AutoModelForCausalLM.from_pretrained(saved(name), dtype=torch.float32).eval()
        with torch.inference_mode():
            found: Tensor = loaded[name](torch.tensor([tokens])).logits[0]
        return found

    return logits


@pytest.fixture
def prompt() -> Callable[..., list[int]]:
    """`prompt(length, seed=0)`: tokens below 200."""

    def drawn(length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        found: list[int] = torch.randint(0, 200, (length,), generator=generator).tolist()
        return found

    return drawn
