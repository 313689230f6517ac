"""Whole pools over a 4-bit base: the same learning however it is held, from a float base or a named shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coresident.engines.pool.base import base
from coresident.engines.pool.inspection import inspect
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.run import drive
from coresident.workload import Reporter

WAYS = {
    "copy": {"sharing": "none"},
    "mapped": {"sharing": "mapped"},
    "fork": {"sharing": "fork"},
    "solo": {"sharing": "fork", "schedule": "solo"},
}


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(base.CACHE, str(tmp_path_factory.mktemp("cache")))
        yield


def settings(tiny_base: Path, **values: Any) -> DPO:
    given: dict[str, Any] = {"base": {"path": str(tiny_base), "quantise": "nf4"}, "learners": 2, "steps": 3}
    return DPO.model_validate(given | {"max_length": 48, "data": {"pairs": 8}} | values)


def run(place: Path, parameters: DPO) -> dict[str, dict[str, Any]]:
    drive(parameters, Reporter(events=place / "events", work=place / "work"))
    lines = [
        json.loads(line) for file in (place / "events").iterdir() for line in file.read_text().splitlines()
    ]
    kinds: dict[str, dict[str, Any]] = {"series": {}, "digest": {}, "control": {}, "metric": {}}
    for line in lines:
        if line["event"] in kinds:
            kinds[line["event"]][line["name"]] = line
    return kinds


@pytest.mark.slow
def test_a_learner_over_a_4_bit_base_learns_the_same_in_all_ways(tmp_path: Path, tiny_base: Path) -> None:
    learned = {}
    for way, values in WAYS.items():
        seen = run(tmp_path / way, settings(tiny_base, **values))
        controls = {name: control["passed"] for name, control in seen["control"].items()}
        assert controls["sharing-engaged"] and controls["base-unchanged"], (way, seen["control"])
        learned[way] = (
            {name: line["values"] for name, line in seen["series"].items()},
            {name: line["value"] for name, line in seen["digest"].items()},
        )
    assert all(one == learned["solo"] for one in learned.values())
    series, _ = learned["fork"]
    assert series["learner-0.loss"][0] == pytest.approx(0.693147, abs=1e-6)
    assert len(set(series["learner-0.loss"])) == 3


def test_a_4_bit_base_takes_what_was_foretold_and_less(tmp_path: Path, tiny_base: Path) -> None:
    parameters = settings(tiny_base, learners=1, sharing="none", steps=2)
    foretold = inspect(parameters).on_card
    seen = run(tmp_path, parameters)
    held = seen["metric"]["base_mib"]["value"] * 2**20
    assert held == foretold == inspect(parameters).on_card
    assert held < 0.8 * inspect(settings(tiny_base, base={"path": str(tiny_base)})).on_card


def test_of_a_named_shape_too(tmp_path: Path, tiny_base: Path) -> None:
    parameters = settings(tiny_base, base={"config": "tiny", "quantise": "nf4"}, learners=1, steps=2)
    foretold = inspect(parameters).on_card
    seen = run(tmp_path, parameters)
    assert seen["metric"]["base_mib"]["value"] * 2**20 == foretold
    assert seen["series"]["learner-0.loss"]["values"][0] == pytest.approx(0.693147, abs=1e-6)


@pytest.mark.slow
def test_packed_learners_over_a_4_bit_base_learn_what_they_learn_alone(
    tmp_path: Path, tiny_base: Path
) -> None:
    learned = {}
    for way in ({"sharing": "packed"}, {"sharing": "fork", "schedule": "solo"}):
        seen = run(tmp_path / way["sharing"], settings(tiny_base, dtype="float64", **way))
        learned[way["sharing"]] = {name: line["values"] for name, line in seen["series"].items()}
    for name, values in learned["fork"].items():
        assert learned["packed"][name] == pytest.approx(values, rel=1e-9, abs=1e-9), name
