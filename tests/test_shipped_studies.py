"""The shipped studies that ask on a CPU what is exact: one block of each, as a user runs it, is within all that it claims."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coresident.lab.study.load import load


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pool-fidelity", "moe-exact"])
def test_one_block_is_within_every_claim(name: str, place: Path, coresident: Callable[..., Any]) -> None:
    done = coresident("run", name, "--devices", "cpu", "--set", "repetitions.min=1")
    # One block settles nothing: its verdict is that all is undecided.
    assert done.status == 3, done.err
    records = [json.loads(file.read_text()) for file in (place / "runs" / name / "records").glob("*.json")]
    arms = {record["cell"]["arm"]: record for record in records}
    study = load(name).study
    assert arms.keys() == study.arms.keys()
    for record in records:
        assert record["status"] == "ok", record["reason"]
    for hypothesis in study.hypotheses.values():
        asked = hypothesis.model_dump(mode="json", exclude_none=True)
        found = arms[asked["compare"]["arm"]]
        if "same" in asked["expect"]:
            other = arms[asked["compare"]["to"]]
            assert found["digests"] and found["digests"] == other["digests"], asked["claim"]
            assert found["series"] == other["series"], asked["claim"]
            continue
        value, bounds = found["metrics"][asked["metric"]]["value"], asked["expect"]["value"]
        assert value <= bounds.get("at_most", value), asked["claim"]
        assert value >= bounds.get("at_least", value), asked["claim"]
