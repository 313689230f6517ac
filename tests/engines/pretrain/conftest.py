"""A token cache of two families on disk, a model that trains in milliseconds, and a training of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pretrain import commands
from coresident.engines.pretrain.parameters import Train
from coresident.text import pythondocs
from coresident.text.cache import TokenCache
from coresident.text.corpus import CorpusSource
from coresident.text.prepare import Prepare, prepare

SHAPE = {"vocabulary": 300, "layers": 1, "width": 16, "heads": 2, "feedforward": 24, "context": 16}
_MIXTURE = {**SHAPE, "feedforward": None, "qk_norm": True, "mixture": {"experts": 4, "top_k": 2, "width": 12}}


@pytest.fixture
def mixture() -> dict[str, Any]:
    """The same with experts."""
    return _MIXTURE


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    """Some 20,000 tokens of documentation and of code, a tenth of them for validation."""
    place = tmp_path_factory.mktemp("text")
    (place / "prose").mkdir()
    (place / "code").mkdir()
    for number, topic in enumerate(pythondocs.corpus()[:30]):
        (place / "prose" / f"{number}.txt").write_text(topic[:1200])
    for number in range(40):
        functions = (
            f"def f{number}_{one}(x, y={one}):\n    return x * {number} + y\n\n" for one in range(12)
        )
        (place / "code" / f"{number}.txt").write_text("".join(functions))
    source = CorpusSource(
        kind="files",
        files={"prose": (str(place / "prose"),), "code": (str(place / "code"),)},
        validation_share=0.1,
    )
    return prepare(Prepare(source=source, vocabulary=300), place / "cache")


@pytest.fixture
def settings(cache: TokenCache) -> Callable[..., Train]:
    """A training of 40 updates of 4 sequences in two microbatches, with anything changed by its dotted key."""

    def made(**changed: Any) -> Train:
        asked: dict[str, Any] = {
            "shape": copy.deepcopy(SHAPE),
            "data": {"cache_dir": str(cache.path)},
            "batch_tokens": 64,
            "microbatch": 2,
            "optimiser": {"learning_rate": 0.01, "beta2": 0.98},
            "budget": {"updates": 40, "virtual_epochs": 4},
            "validation": {"batch": 32, "subset": 320},
            "runtime": {"log_every": 3, "threads": 1},
        }
        for key, value in changed.items():
            *path, last = key.split("__")
            here = asked
            for name in path:
                here = here.setdefault(name, {})
            here[last] = value
        return Train.model_validate(asked)

    return made


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Trains into `tmp_path / out` in this process and returns the result."""

    def trained(asked: Train, out: str = "run", resume: bool = False, device: str = "cpu") -> dict[str, Any]:
        return commands.train(asked, tmp_path / out, device, resume, lambda _: None, lambda _: None)

    return trained
