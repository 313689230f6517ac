"""Views of pool records: who was not finite, what each learner's losses were, what each process held when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coresident.engines.pool.views.losses import view as losses
from coresident.engines.pool.views.memory import view as memory
from coresident.engines.pool.views.nonfinite import view as nonfinite
from coresident.errors import UserError
from coresident.views import Seen, View, view


def seen(place: Path | None = None, **record: Any) -> Seen:
    known = {
        "status": "ok",
        "reason": "",
        "cell": {"parameters": {"learners": 2}},
        "series": {},
        "environment": {},
    }
    return Seen("cell-r0-a1", known | record, False, place)


def series(**values: list[float | None]) -> dict[str, dict[str, Any]]:
    """Series by their names, with two underscores for a dot and one for a hyphen."""
    return {
        name.replace("__", ".").replace("learner_", "learner-"): {"length": len(told), "values": told}
        for name, told in values.items()
    }


def shown(view: View, *records: Seen) -> list[tuple[str, ...]]:
    (table,) = view.tables(view.data(records))
    return list(table.rows)


def test_a_loss_that_is_none_is_counted_with_its_step() -> None:
    one = seen(
        status="nonfinite", series=series(learner_0__loss=[0.7, 0.6], learner_1__loss=[0.7, None, None])
    )
    (row,) = nonfinite.data([one])
    assert row["nonfinite"] == [{"learner": 1, "what": "loss", "step": 2}]
    assert (row["learners"], row["finite"], row["missing"]) == (2, 1, [])
    assert shown(nonfinite, one) == [("cell-r0-a1", "nonfinite", "2", "1", "1 (loss at step 2)", "-")]


def test_a_learner_that_ended_before_it_could_write_is_named_by_the_reason() -> None:
    one = seen(
        status="nonfinite",
        reason="learner 1: the gradient norm is inf at step 3",
        series=series(learner_0__loss=[0.7], learner_1__loss=[0.7, 0.69]),
    )
    assert nonfinite.data([one])[0]["nonfinite"] == [{"learner": 1, "what": "gradient norm", "step": 3}]


def test_a_learner_whose_siblings_went_on_is_named_by_what_the_pool_says(tmp_path: Path) -> None:
    one = seen(
        environment={"failed": {"learner 0": "the loss is nan at step 2"}},
        series=series(learner_0__loss=[0.7], learner_1__loss=[0.7, 0.6]),
    )
    (row,) = nonfinite.data([one])
    assert (row["status"], row["finite"]) == ("ok", 1)
    assert row["nonfinite"] == [{"learner": 0, "what": "loss", "step": 2}]


def test_a_learner_of_which_nothing_is_told_is_missing_and_not_finite() -> None:
    (row,) = nonfinite.data([seen(status="failed", series=series(learner_1__loss=[0.7]))])
    assert (row["finite"], row["missing"], row["nonfinite"]) == (1, [0], [])


def test_the_census_counts_over_records() -> None:
    bad = seen(
        series=series(learner_0__first_and_last_loss=[None, None], learner_1__first_and_last_loss=[0.7, 0.6])
    )
    (table,) = nonfinite.tables(nonfinite.data([bad, bad, seen()]))
    assert table.title == "2 nonfinite learners in 2 of 3 records"


def test_losses_tell_each_learner_and_say_what_is_not_known() -> None:
    one = seen(
        series={
            **series(
                learner_10__loss=[0.7, 0.4, 0.5], learner_2__first_and_last_loss=[0.7, None],
                learner_2__tokens=[1.0],
            ),
            "learner-3.loss": {"length": 5000, "values": []},
        }
    )  # fmt: skip
    assert shown(losses, one) == [
        ("2", "ends only", "0.7000", "not finite", "0.7000"),
        ("3", "5000", "not kept", "not kept", "not kept"),
        ("10", "3", "0.7000", "0.5000", "0.4000"),
    ]
    assert losses.data([one])[0]["learners"][2]["losses"] == [0.7, 0.4, 0.5]


SAMPLES = [
    {"t": 0.0, "processes": {"7": 10.0}, "card": {"used_mib": 500.0}},
    {"t": 1.0, "processes": {"7": 20.0, "8": 100.0}, "card": {"used_mib": 900.0}},
    {"t": 2.0, "processes": {"7": 15.0, "8": 300.0}},
    {"t": 3.0, "processes": {"7": None, "8": 200.0}, "card": {"used_mib": 700.0}},
]


def test_memory_over_time_names_processes_and_holds_each_sample(tmp_path: Path) -> None:
    (tmp_path / "telemetry").mkdir()
    lines = "".join(json.dumps(line) + "\n" for line in SAMPLES) + '{"t": 4.0, "proc'
    (tmp_path / "telemetry" / "samples.jsonl").write_text(lines)
    one = seen(tmp_path, environment={"process learner 0": 8})
    (row,) = memory.data([one])
    assert row["source"] == "samples"
    assert [(process["process"], process["peak_mib"]) for process in row["processes"]] == [
        ("learner 0", 300.0), ("-", 20.0), ("whole card", 900.0),
    ]  # fmt: skip
    assert row["processes"][0]["points"] == [[1.0, 100.0], [2.0, 300.0], [3.0, 200.0]]
    assert shown(memory, one) == [
        ("learner 0", "8", "1.0", "3.0", "100.0", "100.0", "300.0", "300.0", "200.0", "300.0", "2.0"),
        ("-", "7", "0.0", "2.0", "10.0", "10.0", "20.0", "20.0", "15.0", "20.0", "1.0"),
        ("whole card", "-", "0.0", "3.0", "500.0", "500.0", "900.0", "900.0", "700.0", "900.0", "1.0"),
    ]


def test_records_alone_tell_peaks(tmp_path: Path) -> None:
    telemetry = {"per_process": [{"pid": 8, "peak_pss_mib": 300.0}], "device_peak_used_mib": 900.0}
    one = seen(
        tmp_path,
        telemetry=telemetry,
        environment={"process golden": 8},
        series=series(learner_1__peak_memory_mib=[50.0]),
    )
    assert shown(memory, one) == [
        ("golden", "8", "300.0"), ("learner 1 (its allocator)", "-", "50.0"), ("whole card", "-", "900.0"),
    ]  # fmt: skip


def test_views_are_found_by_their_entry_points() -> None:
    assert (view("losses"), view("memory"), view("nonfinite")) == (losses, memory, nonfinite)
    with pytest.raises(UserError, match="no view 'loses'") as refused:
        view("loses")
    assert refused.value.remedy == "did you mean 'losses'?"


STUDY = """\
study: seen
question: What did it hold?
workload: pool.dpo
parameters: {base: {config: tiny}, learners: 2, steps: 200, max_length: 48, data: {pairs: 8}}
arms: {fork: {sharing: fork}}
repetitions: {min: 1}
"""


@pytest.mark.slow
def test_a_measured_pool_is_seen_process_by_process(place: Path, coresident: Any) -> None:
    (place / "seen.yaml").write_text(STUDY)
    assert coresident("run", "seen.yaml").status == 0
    (row,) = json.loads(coresident("show", "runs/seen", "--view", "memory", "--json").out)
    held = {process["process"]: process for process in row["processes"]}
    assert {"driver", "golden", "zygote", "learner 0", "learner 1"} <= held.keys()
    assert held["zygote"]["peak_mib"] > 50
    assert all(len(point) == 2 for process in held.values() for point in process["points"])
    (row,) = json.loads(coresident("show", "runs/seen", "fork", "--view", "losses", "--json").out)
    assert [learner["steps"] for learner in row["learners"]] == [200, 200]
    assert row["learners"][0]["first"] == pytest.approx(0.693147, abs=1e-5)
    assert (
        "0 nonfinite learners in 0 of 1 records" in coresident("show", "runs/seen", "--view", "nonfinite").out
    )


def test_a_run_of_something_else_has_no_such_view(small: Path, coresident: Any) -> None:
    done = coresident("show", str(small), "--view", "losses")
    assert done.status == 2
    assert "view 'losses' shows records of pool.dpo, and its records are of command" in done.err
