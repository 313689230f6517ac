"""How often the procedure decides falsely, and that it does decide: simulated studies, judged by the real
functions.

The mutations at the end show that the calibration would notice if pairing or intervals were lost.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from coresident.lab.verdict import intervals, procedure
from coresident.lab.verdict.intervals import Interval

MOST_FALSE = 0.05
LEAST_POWER = 0.80


def _load() -> ModuleType:
    name = "coresident_calibrate"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("calibrate.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by its name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


calibrate = _load()


@pytest.mark.parametrize("machine", calibrate.MACHINES)
def test_at_most_one_in_twenty_decisions_is_false(machine: str) -> None:
    for design in calibrate.DESIGNS:
        for floor in (0.002, 0.0) if design.half_width else (0.002,):
            tally = calibrate.simulate(machine, design, floor=floor)
            assert tally.studies == 2000
            assert tally.decided <= MOST_FALSE, tally


def test_five_percent_under_two_percent_noise_is_decided_and_rightly() -> None:
    for tally in calibrate.power():
        assert tally.supported / tally.studies >= LEAST_POWER, tally
        assert tally.refuted / tally.studies <= 0.01, tally


def test_both_arms_run_first_equally_often_and_alternate() -> None:
    orders = calibrate._orders(12)
    assert (orders[:, 1:] != orders[:, :-1]).all()
    assert 0.3 < orders[:, 0].mean() < 0.7


@pytest.mark.parametrize("design", ["3 blocks", "9 blocks", "12 blocks", "3 to 9, until 3 %"])
def test_records_are_judged_exactly_as_the_simulation_judges_numbers(
    lab: Any, ratio: dict[str, Any], design: str
) -> None:
    chosen = next(one for one in calibrate.DESIGNS if one.name == design)
    repetitions: dict[str, Any] = {"min": chosen.smallest, "max": chosen.largest}
    if chosen.half_width:
        repetitions["until"] = {"half_width": chosen.half_width}
    states = set()
    for truth in (0.9, 0.95, 1.0):
        for pairs in calibrate.measured("2 % noise", chosen.largest, truth, studies=8):
            run = lab({"H1": ratio}, settings={"repetitions": repetitions})
            for block, (arm, to) in enumerate(pairs):
                if block >= chosen.smallest and not run.wide():
                    break
                run.add("fork", block, {"speed": arm})
                run.add("native", block, {"speed": to})
            expected = calibrate.decision(pairs, chosen, 0.95, floor=run.study.noise_floor)
            assert run.judged().state is expected
            states.add(expected)
    assert len(states) >= 2


@pytest.fixture
def fresh_quantiles() -> Iterator[None]:
    intervals.t_quantile.cache_clear()
    yield
    intervals.t_quantile.cache_clear()


def _worst() -> float:
    machines = ("2 % noise", "drift 1 % a run, 0.1 % noise")
    tallies = [calibrate.simulate(m, design, studies=500) for m in machines for design in calibrate.DESIGNS]
    return max(tally.decided for tally in tallies)


def test_mutation_without_pairing_drift_drowns_the_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    paired = procedure.log_ratios
    shuffler = random.Random(1)

    def unpaired(pairs: list[tuple[float, float]]) -> list[float]:
        others = [to for _, to in pairs]
        shuffler.shuffle(others)
        return paired([(arm, to) for (arm, _), to in zip(pairs, others, strict=True)])

    monkeypatch.setattr(procedure, "log_ratios", unpaired)
    assert min(tally.supported / tally.studies for tally in calibrate.power()) < LEAST_POWER


def test_mutation_without_an_interval_nearly_every_decision_is_false(monkeypatch: pytest.MonkeyPatch) -> None:
    def point(values: list[float], floor: float = 0.0) -> Interval | None:
        mean = sum(values) / max(1, len(values))
        return Interval(mean, mean, mean)

    monkeypatch.setattr(procedure, "interval", point)
    assert _worst() > 0.9


def test_mutation_95_percent_is_not_enough_once_runs_stop_on_width(
    monkeypatch: pytest.MonkeyPatch, fresh_quantiles: None
) -> None:
    monkeypatch.setattr(intervals, "CONFIDENCE", 0.95)
    assert _worst() > MOST_FALSE


def test_mutation_a_fixed_order_turns_drift_into_a_false_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = calibrate._orders

    def arm_always_first(blocks: int) -> Any:
        return orders(blocks) | True

    monkeypatch.setattr(calibrate, "_orders", arm_always_first)
    tally = calibrate.simulate("drift 1 % a run, 0.1 % noise", calibrate.NINE, studies=500)
    assert tally.refuted / tally.studies > 0.9
