"""4-bit bases on a card: the same learning however they are held, and 8-bit moments that are the CPU's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from coresident.engines.pool.base import base
from coresident.engines.pool.fit import architecture, data
from coresident.engines.pool.fit.predict import Predictor
from coresident.engines.pool.learning.adamw8bit import AdamW8bit
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.run import drive
from coresident.workload import Reporter

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

MIB = 2**20
WAYS: dict[str, dict[str, Any]] = {
    "copy": {"sharing": "none"},
    "fork": {"sharing": "fork"},
    "solo": {"sharing": "none", "schedule": "solo"},
}


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(base.CACHE, str(tmp_path_factory.mktemp("cache")))
        yield


def settings(**values: Any) -> DPO:
    given: dict[str, Any] = {
        "base": {"config": "small", "quantise": "nf4"},
        "dtype": "bfloat16",
        "learners": 2,
        "steps": 4,
        "max_length": 64,
        "data": {"pairs": 8},
    }
    return DPO.model_validate(given | values)


def run(place: Path, card: str, parameters: DPO) -> dict[str, dict[str, Any]]:
    drive(parameters, Reporter(events=place / "events", work=place / "work", device=card))
    kinds: dict[str, dict[str, Any]] = {"series": {}, "digest": {}, "control": {}, "metric": {}}
    for file in (place / "events").iterdir():
        for line in map(json.loads, file.read_text().splitlines()):
            if line["event"] in kinds:
                kinds[line["event"]][line["name"]] = line
    return kinds


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_native_forked_and_solo_learners_learn_the_same(tmp_path: Path, card: str, optimizer: str) -> None:
    learned = {}
    for way, values in WAYS.items():
        seen = run(tmp_path / way, card, settings(deterministic=True, optimizer=optimizer, **values))
        assert all(control["passed"] is not False for control in seen["control"].values()), seen["control"]
        learned[way] = (
            {name: line["values"] for name, line in seen["series"].items()},
            {name: line["value"] for name, line in seen["digest"].items()},
        )
    assert learned["copy"] == learned["solo"]
    assert learned["fork"] == learned["solo"]
    assert learned["solo"][0]["learner-0.loss"][0] == pytest.approx(0.693147, abs=1e-6)


def test_a_4_bit_base_takes_on_the_card_what_was_foretold(tmp_path: Path, card: str) -> None:
    parameters = settings(
        base={"config": "qwen2.5-1.5b", "quantise": "nf4"}, data={"source": "arithmetic"}, max_length=256
    )
    seen = run(tmp_path, card, parameters)
    config = base.read(base.location(parameters.base, parameters.dtype)).config
    size = base.estimate(parameters.base, parameters.dtype)
    predictor = Predictor(parameters, architecture.of(config, "here"), size, True, data.looked_up(parameters))
    foretold = predictor.at(parameters.learners).total / MIB
    assert seen["metric"]["device_memory_mib"]["value"] == pytest.approx(foretold, rel=0.05)


def test_moments_in_8_bits_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in ((64, 1536), (5000,), (100,))]
    gradients = [[torch.randn_like(value) * 1e-3 for value in start] for _ in range(5)]
    found = []
    for device in ("cpu", "cuda"):
        # Copied, on the CPU too, where they are learned in place.
        parameters = [nn.Parameter(value.to(device, copy=True)) for value in start]
        optimizer = AdamW8bit(parameters, lr=1e-3, weight_decay=0.01)
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.to(device, copy=True)
            optimizer.step()
        found.append([parameter.detach().cpu() for parameter in parameters])
    for one, other in zip(*found, strict=True):
        # A number between two values of the table may be rounded to either.
        assert (one - other).abs().mean() < 1e-6
