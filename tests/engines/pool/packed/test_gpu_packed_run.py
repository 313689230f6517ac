"""Whole packs on a card, with all their processes: reported as any pool is, one process and one base on the card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coresident.engines.pool.base import base
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.run import drive
from coresident.workload import Reporter

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(base.CACHE, str(tmp_path_factory.mktemp("cache")))
        yield


def events(place: Path, kind: str) -> dict[str, Any]:
    lines = [
        json.loads(line) for file in (place / "events").iterdir() for line in file.read_text().splitlines()
    ]
    return {line.get("name", line.get("id")): line for line in lines if line["event"] == kind}


@pytest.mark.parametrize("step", ["eager", "compiled", "captured"])
@pytest.mark.parametrize(
    "held", [{}, {"base": {"config": "tiny", "quantise": "nf4"}, "optimizer": "adamw8bit"}], ids=str
)
def test_it_reports_what_learners_in_processes_of_their_own_do(
    tmp_path: Path, card: str, step: str, held: dict[str, Any]
) -> None:
    asked = {
        "base": {"config": "tiny"}, "learners": 3, "steps": 6, "max_length": 64, "data": {"pairs": 8},
        "own": [{"rank": 4}, {"rank": 8, "steps": 4}, {"passes": 1}], **held,
    }  # fmt: skip
    series = {}
    for sharing in ("packed", "none"):
        place = tmp_path / sharing
        told = asked | {"sharing": sharing} | ({"step": step} if sharing == "packed" else {})
        found = drive(
            DPO.model_validate(told), Reporter(events=place / "events", work=place / "work", device=card)
        )
        assert sorted(found.learned) == [0, 1, 2]
        controls = events(place, "control")
        assert controls["sharing-engaged"]["passed"]
        assert controls["base-unchanged"]["passed"]
        series[sharing] = events(place, "series")
    assert series["packed"].keys() == series["none"].keys()
    for name, line in series["none"].items():
        if name.endswith((".loss", ".tokens")):
            assert series["packed"][name]["values"] == pytest.approx(line["values"], rel=1e-3), name


@pytest.mark.parametrize("step", ["eager", "compiled", "captured"])
def test_a_pack_that_is_kept_goes_on_as_if_it_had_not_stopped(tmp_path: Path, card: str, step: str) -> None:
    series = {}
    for name, legs in (("whole", (8,)), ("in two", (5, 8))):
        for number, steps in enumerate(legs):
            place = tmp_path / name
            asked = {
                "base": {"config": "tiny"}, "learners": 2, "steps": steps, "max_length": 64, "data": {"pairs": 8},
                "own": [{"rank": 4}, {"rank": 8, "steps": min(steps, 6)}], "sharing": "packed", "step": step,
                "checkpoint_every": 4,
            }  # fmt: skip
            found = drive(
                DPO.model_validate(asked),
                Reporter(events=place / f"events-{number}" / "events", work=place / "work", device=card),
            )
            assert {number: one.steps for number, one in found.learned.items()} == {
                0: steps,
                1: min(steps, 6),
            }
        series[name] = events(place / f"events-{len(legs) - 1}", "series")
    for name, line in series["whole"].items():
        assert len(series["in two"][name]["values"]) == len(line["values"]), name
        if name.endswith((".loss", ".tokens")):
            assert series["in two"][name]["values"] == pytest.approx(line["values"], rel=1e-3), name
