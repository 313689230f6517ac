"""`moe.simulate` in a cell of the lab, and the studies that are shipped of it."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coresident.engines.moe.simulate import cell as cells
from coresident.engines.moe.simulate.parameters import Simulate
from coresident.engines.moe.simulate.simulation import simulate as directly
from coresident.engines.moe.simulate.workload import METRICS, simulate
from coresident.engines.moe.traces.files import read, write
from coresident.errors import UserError
from coresident.workload import Reporter, workload

_COST = {"expert_bytes": 1000, "bytes_per_second": 1e6, "resident_seconds": 4e-3}


def _events(tmp_path: Path, asked: Simulate) -> list[dict[str, Any]]:
    simulate.run(asked, Reporter(tmp_path / "events", tmp_path))
    files = list((tmp_path / "events").iterdir())
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def _asked(tmp_path: Path, made: Callable, **values: Any) -> Simulate:
    if not (tmp_path / "set").exists():
        write(made(), tmp_path / "set")
    return Simulate.model_validate({"traces": str(tmp_path / "set"), "capacity": 6, **values})


def test_a_cell_reports_what_a_simulation_found(made: Callable, tmp_path: Path) -> None:
    asked = _asked(tmp_path, made, predictor="probe", cost=_COST)
    events = _events(tmp_path, asked)
    metrics = {one["name"]: one for one in events if one["event"] == "metric"}
    found = directly(read(tmp_path / "set"), asked)
    assert metrics["hit_rate"]["value"] == found.asked.hit_rate
    assert metrics["recall"]["value"] == found.asked.predicted.recall
    assert metrics["belady_hit_rate"]["value"] == found.belady.hit_rate
    assert metrics["tokens_per_second"]["value"] == pytest.approx(1 / found.asked.times.simulated)
    assert metrics["chance_recall"]["value"] == found.beside["chance"].recall
    declared = {one.name: one.unit for one in METRICS}
    assert {name: one["unit"] for name, one in metrics.items()} == declared
    assert len([one for one in events if one["event"] == "sample"]) == 4
    assert events[-1]["event"] == "done"


def test_a_simulation_repeats_bit_for_bit(made: Callable, tmp_path: Path) -> None:
    asked = _asked(tmp_path, made, predictor="chance", cost=_COST)
    whole = read(tmp_path / "set")
    assert directly(whole, asked) == directly(whole, asked)


def test_what_was_fitted_and_judged_on_one_prompt_fails_its_control(made: Callable, tmp_path: Path) -> None:
    good = _events(tmp_path / "good", _asked(tmp_path, made, policy="static"))
    bad = _events(tmp_path / "bad", _asked(tmp_path, made, policy="static", split="all"))
    passed = [[one["passed"] for one in events if one["event"] == "control"] for events in (good, bad)]
    assert passed == [[True], [False]]


def test_traces_and_settings_are_checked_before_anything_is_written(made: Callable, tmp_path: Path) -> None:
    needs = cells.inspect(_asked(tmp_path, made))
    assert [path.name for path in needs.inputs] == ["manifest.json"]
    for values, said in (
        ({"traces": str(tmp_path / "none")}, "is no set of traces.*coresident moe trace MODEL --out .*none"),
        ({"capacity": 2}, "2 slots cannot hold"),
        ({"families": ["poems"]}, "family 'poems'"),
    ):
        with pytest.raises(UserError, match=said):
            cells.inspect(_asked(tmp_path, made, **values))


def test_the_workload_is_found_by_name() -> None:
    assert workload("moe.simulate").parameters is Simulate


@pytest.mark.parametrize(("study", "capacities"), [("moe-simulated", {2, 4, 6, 8}), ("moe-predictors", {4})])
def test_what_a_study_says_of_small_models_is_so(
    made: Callable, tmp_path: Path, study: str, capacities: set[int]
) -> None:
    """The overrides in its head, on the shape of the model that docs/moe-traces.md trains."""
    from coresident.lab.study.cells import expand
    from coresident.lab.study.load import load

    text = (files("coresident") / "studies" / f"{study}.yaml").read_text(encoding="utf-8")
    head = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#   "))
    changes = [word for word in shlex.split(head) if word != "--set"]
    assert changes[0] == "parameters.traces=traces"
    traces = made(prompts=4, steps=6, layers=2, experts=8, k=2)
    prompts = tuple(
        replace(one, ahead=np.zeros((len(one.tokens), 1, 2, 8), np.uint8)) for one in traces.prompts
    )
    write(replace(traces, prompts=prompts, depths=(1,)), tmp_path / "set")
    loaded = load(study, [*changes, f"parameters.traces={tmp_path / 'set'}"])
    asked = [
        Simulate.model_validate_json(json.dumps(one.parameters)) for one in expand(loaded.study, simulate)
    ]
    assert {one.capacity for one in asked} == capacities
    for one in asked:
        cells.inspect(one)
        assert directly(read(tmp_path / "set"), one).asked.hit_rate > 0


@pytest.mark.parametrize("study", ["moe-simulated", "moe-predictors"])
def test_every_cell_of_a_shipped_study_can_be_asked(made: Callable, tmp_path: Path, study: str) -> None:
    from coresident.lab.study.cells import expand
    from coresident.lab.study.load import load

    traces = made(prompts=4, steps=6, layers=5, experts=64, k=8)
    prompts = tuple(
        replace(one, ahead=np.zeros((len(one.tokens), 3, 5, 16), np.uint8)) for one in traces.prompts
    )
    write(replace(traces, prompts=prompts, depths=(1, 2, 3)), tmp_path / "set")
    loaded = load(study, [f"parameters.traces={tmp_path / 'set'}"])
    metrics = {one.name for one in METRICS}
    assert {one.metric for one in loaded.study.hypotheses.values()} <= metrics
    for one in expand(loaded.study, simulate):
        asked = Simulate.model_validate_json(json.dumps(one.parameters))
        cells.inspect(asked)
        assert directly(read(tmp_path / "set"), asked).asked.hit_rate > 0
