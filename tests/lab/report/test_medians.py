"""Medians: what counts, what is counted beside, and how it reads."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from coresident.lab.report import medians
from coresident.workload import Metric, Parameters, Workload

WORKLOAD = Workload(
    name="command",
    about="",
    parameters=Parameters,
    metrics=(Metric("memory", "MiB", "less", ""), Metric("speed", "1/s", "more", "")),
    controls=frozenset(),
    run=lambda parameters, cell: None,
)


def table(run: Any, metrics: list[str] | None = None) -> medians.Medians:
    return medians.table(WORKLOAD, run.cells, run.records, metrics)


def filled(lab: Any) -> Any:
    run = lab({}, factors={"learners": [2, 4]})
    for repetition, speed in enumerate((100.0, 130.0, 110.0)):
        for learners in (2, 4):
            at = {"learners": learners}
            run.add("native", repetition, {"extra": 1.0, "speed": speed, "memory": 8.0}, at=at)
            run.add("fork", repetition, {"speed": 2 * speed}, at=at)
    return run


def test_rows_are_metrics_and_points_and_columns_are_arms(lab: Any) -> None:
    found = table(filled(lab))
    assert found.arms == ("native", "fork")
    # Declared metrics first, in the workload's order; others follow.
    assert [(row.metric, dict(row.at)) for row in found.rows] == [
        (metric, {"learners": learners}) for metric in ("memory", "speed", "extra") for learners in (2, 4)
    ]
    speed = found.rows[2]
    assert speed.by_arm["native"].values == (100.0, 130.0, 110.0)
    assert speed.by_arm["fork"].text() == "220 [200–260] n=3"
    assert found.rows[0].by_arm["fork"].text() == "-"


def test_only_ok_records_of_the_newest_conditions_enter_and_the_others_are_counted_beside(lab: Any) -> None:
    run = lab({})
    for repetition in range(3):
        run.add("native", repetition, {"speed": 1.0}, conditions={"driver": "1"})
    for repetition, status in enumerate(["ok", "ok", "oom", "failed", "invalid"]):
        run.add(
            "native",
            repetition,
            {"speed": 5.0 + repetition},
            status=status,
            generation=1,
            conditions={"driver": "2"},
        )
    (row,) = table(run).rows
    assert row.by_arm["native"].values == (5.0, 6.0)
    assert row.by_arm["native"].text() == "5.5 [5–6] n=2, 1 oom, 1 failed, 1 invalid"


def test_a_remeasured_repetition_counts_once(lab: Any) -> None:
    run = lab({})
    run.add("native", 0, {"speed": 1.0}, generation=0)
    run.add("native", 0, {"speed": 2.0}, generation=1)
    assert table(run).rows[0].by_arm["native"].values == (2.0,)


def test_arms_under_different_conditions_are_marked(lab: Any) -> None:
    run = lab({})
    run.add("native", 0, {"speed": 1.0}, conditions={"driver": "1"})
    run.add("fork", 0, {"speed": 1.0}, conditions={"driver": "2"})
    assert table(run).rows[0].mixed
    assert "All arms: measured under different conditions" in medians.markdown(table(run))
    assert not any(row.mixed for row in table(filled(lab)).rows)


def test_numbers_of_two_units_have_no_median(lab: Any) -> None:
    run = lab({})
    run.add("native", 0, {"speed": 1.0}, unit="1/s")
    run.add("native", 1, {"speed": 1.0}, unit="1/ms")
    assert table(run).rows[0].by_arm["native"].text() == "2 in 1/ms and in 1/s"


def test_arms_of_two_units_each_tell_their_own(lab: Any) -> None:
    run = lab({})
    run.add("native", 0, {"speed": 1.0}, unit="1/s")
    run.add("fork", 0, {"speed": 2.0}, unit="1/ms")
    assert "1 1/s | 2 1/ms" in medians.markdown(table(run))


def test_it_reads_as_shown_not_claimed_and_tells_n_once(lab: Any) -> None:
    stream = io.StringIO()
    medians.terminal(table(filled(lab), ["speed"]), Console(file=stream, width=100, force_terminal=False))
    assert stream.getvalue().splitlines() == [
        "Measured: median [lowest–highest] over blocks; shown, not claimed; n=3",
        "metric      at         native        fork",
        "speed (1/s) learners=2 110 [100–130] 220 [200–260]",
        "            learners=4 110 [100–130] 220 [200–260]",
        "",
    ]


def test_markdown_repeats_the_metric_in_each_row(lab: Any) -> None:
    lines = medians.markdown(table(filled(lab), ["speed"])).splitlines()
    assert lines[2] == "| metric | at | native | fork |"
    assert lines[4:] == [
        "| speed (1/s) | learners=2 | 110 [100–130] | 220 [200–260] |",
        "| speed (1/s) | learners=4 | 110 [100–130] | 220 [200–260] |",
    ]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_nothing_measured_prints_nothing(lab: Any, is_terminal: bool) -> None:
    stream = io.StringIO()
    medians.terminal(table(lab({})), Console(file=stream, force_terminal=is_terminal))
    assert stream.getvalue() == "" and medians.markdown(table(lab({}))) == ""
