"""What a pool found becomes metrics and controls; a base that changed, for anybody, is a failed control."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from coresident.engines.pool.findings import Findings, Learned, base_unchanged, report
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.sharing.device_sharing import DeviceHeld, DeviceUse
from coresident.engines.pool.sharing.sharing import Decision, Held
from coresident.engines.pool.workload import METRICS
from coresident.workload import Reporter

MIB = 2**20
ONE = Learned(
    start=10.0, end=12.0, tokens=100, step_ms=20.0, before="a", after="a", adapter="x", first_loss=0.7,
    last_loss=0.5, steps=3,
)  # fmt: skip
SHARED = Held(size=MIB, resident=MIB, private=0, shared=MIB, others=MIB)


def found() -> Findings:
    return Findings(
        start=0.0, base_bytes=MIB, base_ready=0.25, fork=0.01, first_step=3.0, learner_bytes=300 * MIB,
        pool_bytes=400 * MIB, together=3, held=[SHARED, SHARED],
        learned={0: ONE, 1: replace(ONE, start=11.0, end=15.0, tokens=300, step_ms=40.0, last_loss=0.7)},
        checksums={"golden": "a"},
    )  # fmt: skip


def told(tmp_path: Path, parameters: DPO, findings: Findings) -> dict[tuple[str, str], dict[str, object]]:
    cell = Reporter(events=tmp_path / "events", work=tmp_path)
    report(parameters, findings, cell)
    (file,) = (tmp_path / "events").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {(line["event"], line["name"]): line for line in lines}


def test_every_declared_metric_is_reported_in_its_unit_and_no_other(tmp_path: Path) -> None:
    findings = found()
    findings.golden_to_first_step = 1.5
    findings.raw_rate = 2e9
    findings.device_use = DeviceUse(100 << 20, 900 << 20, 300 << 20, 1000 << 20, 2)
    events = told(tmp_path, DPO(sharing="fork"), findings)
    assert events["metric", "device_memory_mib"]["value"] == 900
    assert events["metric", "marginal_device_memory_mib"]["value"] == 300
    reported = {name: line["unit"] for (event, name), line in events.items() if event == "metric"}
    assert reported == {metric.name: metric.unit for metric in METRICS}


def test_on_a_card_its_own_figures_decide(tmp_path: Path) -> None:
    findings = found()
    findings.device_held = [DeviceHeld(10, 10, 0, 20, 30)] * 2
    findings.device_use = DeviceUse(0, 0, 0, 0, 2)
    findings.mps = ({"clients": 0}, Decision(False, "learner 0 ran without MPS"))
    findings.cached = 0.5
    events = told(tmp_path, DPO(sharing="fork", mps="on", page_cache="cold"), findings)
    control = events["control", "sharing-engaged"]
    assert (control["passed"], control["ran"]["learners"][0]["private_mib"]) == (False, 0.0)
    assert events["control", "mps"]["reason"] == "learner 0 ran without MPS"
    assert events["control", "page-cache"]["passed"] is False


def test_throughput_is_all_work_over_the_whole_window(tmp_path: Path) -> None:
    events = told(tmp_path, DPO(sharing="fork"), found())
    # 400 tokens between 10 and 15 s; the learners' own rates are 50 and 75.
    assert events["metric", "tokens_per_second"]["value"] == 80.0
    assert events["metric", "tokens_per_second_per_learner"]["value"] == 62.5
    assert events["metric", "step_ms"]["value"] == 30.0
    assert events["metric", "last_loss"]["value"] == pytest.approx(0.6)


def test_memory_that_could_not_be_read_is_not_a_number(tmp_path: Path) -> None:
    findings = found()
    findings.memory_unread = True
    findings.held = [SHARED, None]
    events = told(tmp_path, DPO(sharing="fork"), findings)
    assert ("metric", "learner_memory_mib") not in events
    assert events["control", "sharing-engaged"]["passed"] is None


@pytest.mark.parametrize(
    ("learned", "golden", "said"),
    [
        ({0: ONE, 1: ONE}, {"golden": "a", "golden after": "a"}, ""),
        ({0: ONE, 1: replace(ONE, after="b")}, {}, "learner 1's base changed while it trained"),
        ({0: ONE, 1: replace(ONE, before="b", after="b")}, {}, "learner 1 saw another base than learner 0"),
        ({0: ONE}, {"golden": "b"}, "golden saw another base than learner 0"),
        ({0: ONE}, {"golden": "a", "golden after": "b"}, "golden after saw another base than learner 0"),
    ],
)
def test_one_checksum_before_and_after_everywhere(
    learned: dict[int, Learned], golden: dict[str, str], said: str
) -> None:
    decision = base_unchanged(learned, golden)
    assert (decision.passed, decision.reason) == (not said, said)
