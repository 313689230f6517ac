"""How far a pool's learners are from themselves alone: told as numbers, and told where it cannot be one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import save_file

from coresident.engines.pool.base import base
from coresident.engines.pool.fidelity import Trained, compare, distance, fidelity
from coresident.engines.pool.parameters import DPO
from coresident.errors import MachineError
from coresident.workload import Reporter, workload


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(base.CACHE, str(tmp_path_factory.mktemp("cache")))
        yield


def learner(place: Path, a: float, b: float, rank: int = 2) -> Path:
    place.mkdir(parents=True)
    tensors = {"x.lora_A.weight": numpy.full((rank, 3), a), "x.lora_B.weight": numpy.full((3, rank), b)}
    save_file(tensors, place / "adapter_model.safetensors")
    return place


def trained(place: Path, b: float = 0.5, **values: Any) -> Trained:
    given: dict[str, Any] = {
        "losses": {0: [0.7, 0.6], 1: [0.7, 0.5]},
        "adapters": {0: learner(place / "0", 1.0, 0.5), 1: learner(place / "1", 1.0, b)},
        "failed": {},
    }
    return Trained(**given | values)


def test_a_distance_is_relative_and_over_all_numbers() -> None:
    assert distance([numpy.array([3.0, 0.0])], [numpy.array([3.0, 4.0])]) == 0.8
    assert distance([numpy.zeros(2)], [numpy.zeros(2)]) == 0.0
    assert distance([numpy.ones(2)], [numpy.zeros(2)]) == numpy.inf


def test_the_learner_that_is_farthest_counts(tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone")
    told = compare(trained(tmp_path / "pool", b=0.6, losses={0: [0.7, 0.6], 1: [0.7, 0.7]}), alone)
    assert told["update_distance"] == pytest.approx(0.2)
    assert told["adapter_distance"] == pytest.approx(0.2 * numpy.sqrt(0.25 / 1.25))
    assert told["loss_distance"] == pytest.approx(0.2 / numpy.hypot(0.7, 0.5))
    assert told["outcomes_differ"] == 0
    assert told["learners_done"] == 2


@pytest.mark.parametrize(
    "values",
    [
        {"losses": {0: [0.7, 0.6], 1: [0.7]}},
        {"failed": {"learner 1": "the loss is nan at step 3"}},
    ],
    ids=["another step", "another reason"],
)
def test_an_end_that_is_another_is_no_distance(tmp_path: Path, values: dict[str, Any]) -> None:
    told = compare(trained(tmp_path / "pool", b=9.0, **values), trained(tmp_path / "alone"))
    assert told["outcomes_differ"] == 1
    assert told["update_distance"] == 0.0


def test_adapters_of_other_shapes_are_no_result(tmp_path: Path) -> None:
    pool, alone = trained(tmp_path / "pool"), trained(tmp_path / "alone")
    other = {0: pool.adapters[0], 1: learner(tmp_path / "other", 1.0, 0.5, rank=3)}
    with pytest.raises(MachineError, match="has other tensors than"):
        compare(Trained(pool.losses, other, {}), alone)


def test_both_trainings_are_real_ones(tmp_path: Path) -> None:
    own = [{"rank": 4}, {"rank": 8, "learning_rate": 1e30, "warmup_steps": 0}]
    asked = {
        "base": {"config": "tiny"}, "sharing": "packed", "learners": 2, "steps": 3, "max_length": 48, "dtype": "float64",
        "data": {"pairs": 8}, "own": own,
    }  # fmt: skip
    assert workload("pool.fidelity") is fidelity
    cell = Reporter(events=tmp_path / "events", work=tmp_path / "work")
    fidelity.run(DPO.model_validate(asked), cell)
    lines = [
        json.loads(line) for file in (tmp_path / "events").iterdir() for line in file.read_text().splitlines()
    ]
    told = {line["name"]: line["value"] for line in lines if line["event"] == "metric"}
    assert told.keys() == {metric.name for metric in fidelity.metrics}
    assert told["adapter_distance"] <= 1e-10
    assert told["loss_distance"] <= 1e-10
    assert (told["outcomes_differ"], told["learners_done"], told["learners_stopped"]) == (0, 1, 1)
    controls = {line["name"]: line["passed"] for line in lines if line["event"] == "control"}
    assert controls.keys() == fidelity.controls
    assert set(controls.values()) == {True}
