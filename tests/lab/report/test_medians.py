"""Medians: what counts, what is counted beside, and how it reads."""

from __future__ import annotations

import io
from collections.abc import Collection
from pathlib import Path
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


RUN = Path("runs/a study")
TITLE = "Measured: median [lowest–highest] over blocks; shown, not judged"


def table(run: Any, claimed: Collection[str] = ()) -> medians.Medians:
    return medians.table(WORKLOAD, run.cells, run.records, claimed)


def shown(found: medians.Medians, width: int = 100, terminal: bool = False) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=terminal, color_system=None)
    medians.terminal(found, console, RUN)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


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
    assert row.by_arm["native"].text() == "5.5 [5–6] n=2"
    assert shown(table(run))[1:] == [
        "metric       native     fork",
        "speed (1/s)  5.5 [5–6]  -",
        "Not counted: native, 1 oom, 1 failed, 1 invalid.",
        "",
    ]


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
    assert "All arms: measured under different conditions" in medians.markdown(table(run), RUN)
    assert not any(row.mixed for row in table(filled(lab)).rows)


def test_numbers_of_two_units_have_no_median(lab: Any) -> None:
    run = lab({})
    run.add("native", 0, {"speed": 1.0}, unit="1/s")
    run.add("native", 1, {"speed": 1.0}, unit="1/ms")
    assert table(run).rows[0].by_arm["native"].text() == "2 in 1/ms and in 1/s"
    assert "Not counted" not in " ".join(shown(table(run)))
    assert shown(table(run))[0] == TITLE


def test_arms_of_two_units_each_tell_their_own(lab: Any) -> None:
    run = lab({})
    run.add("native", 0, {"speed": 1.0}, unit="1/s")
    run.add("fork", 0, {"speed": 2.0}, unit="1/ms")
    assert "1 1/s | 2 1/ms" in medians.markdown(table(run), RUN)


def test_it_reads_as_shown_not_judged_and_tells_n_once(lab: Any) -> None:
    assert shown(table(filled(lab), ["speed"])) == [
        f"{TITLE}; n=3",
        "metric       at          native         fork",
        "speed (1/s)  learners=2  110 [100–130]  220 [200–260]",
        "             learners=4  110 [100–130]  220 [200–260]",
        "2 more metrics: coresident verdict 'runs/a study' --all",
        "",
    ]


def test_only_claimed_metrics_are_shown_and_the_others_counted(lab: Any) -> None:
    run = filled(lab)
    found = table(run, {"extra", "memory", "unheard-of"})
    assert [row.metric for row in found.rows] == ["memory", "memory", "extra", "extra"]
    assert found.others == 1
    told = "1 more metric: coresident verdict 'runs/a study' --all"
    assert shown(found)[-2] == told and medians.markdown(found, RUN).endswith(f"\n\n{told}\n")


@pytest.mark.parametrize("claimed", [(), ("unheard-of",)])
def test_where_no_claimed_metric_was_measured_all_are_shown(claimed: tuple[str, ...], lab: Any) -> None:
    found = table(filled(lab), claimed)
    assert {row.metric for row in found.rows} == {"memory", "speed", "extra"} and found.others == 0
    assert "--all" not in medians.markdown(found, RUN)


def test_what_failed_beside_is_told_once_below_the_table_not_in_each_row(lab: Any) -> None:
    run = filled(lab)
    for learners in (2, 4):
        run.add("fork", 3, status="oom", at={"learners": learners})
    run.add("fork", 4, status="failed", at={"learners": 4})
    text = "\n".join(shown(table(run, ["speed"])))
    assert text.count("oom") == 2
    assert "\nNot counted: fork at learners=2, 1 oom; fork at learners=4, 1 oom, 1 failed.\n" in text


def test_an_arm_that_never_worked_says_so_in_its_cell(lab: Any) -> None:
    run = lab({})
    run.add("native", 0, {"speed": 1.0})
    run.add("fork", 0, status="oom")
    assert shown(table(run))[1:] == ["metric       native  fork", "speed (1/s)  1       1 oom", ""]


def many(lab: Any, arms: int, points: int, width: int, terminal: bool = False) -> list[str]:
    """What is below the title."""
    names, levels = [f"arm{number}" for number in range(arms)], list(range(points))
    run = lab({}, factors={"learners": levels}, arms=names)
    for repetition, value in enumerate((1.0, 2.0, 3.0)):
        for arm in names:
            for level in levels:
                run.add(arm, repetition, {"speed": value, "memory": value}, at={"learners": level})
    lines = shown(table(run), width, terminal)
    return lines[next(number for number, line in enumerate(lines) if line.endswith("n=3")) + 1 :]


def test_arms_are_columns_where_that_fits_and_else_points_are(lab: Any) -> None:
    wide, narrow = (many(lab, arms=5, points=2, width=width) for width in (100, 60))
    assert wide[:3] == [
        "metric        at          arm0     arm1     arm2     arm3     arm4",
        "memory (1/s)  learners=0  2 [1–3]  2 [1–3]  2 [1–3]  2 [1–3]  2 [1–3]",
        "              learners=1  2 [1–3]  2 [1–3]  2 [1–3]  2 [1–3]  2 [1–3]",
    ]
    assert narrow[:3] == [
        "metric        arm   learners=0  learners=1",
        "memory (1/s)  arm0  2 [1–3]     2 [1–3]",
        "              arm1  2 [1–3]     2 [1–3]",
    ]
    assert (len(wide), len(narrow)) == (1 + 2 * 2 + 1, 1 + 2 * 5 + 1)


def test_where_metrics_have_no_room_beside_their_numbers_they_are_headings(lab: Any) -> None:
    assert many(lab, arms=3, points=3, width=40) == [
        "metric",
        "  at          arm0     arm1     arm2",
        *(
            line
            for metric in ("memory", "speed")
            for line in (
                f"{metric} (1/s)",
                *(f"  learners={level}  2 [1–3]  2 [1–3]  2 [1–3]" for level in range(3)),
            )
        ),
        "",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_console_too_narrow_for_any_columns_gets_a_line_a_value(lab: Any, terminal: bool) -> None:
    lines = many(lab, arms=4, points=4, width=40, terminal=terminal)
    assert lines[:4] == ["memory (1/s)", "  at    learners=0", "  arm0  2 [1–3]", "  arm1  2 [1–3]"]
    assert len(lines) == 2 * (1 + 4 * 5) + 1


def test_a_terminal_sees_the_same_with_a_line_under_the_headers(lab: Any) -> None:
    found = table(filled(lab), ["speed"])
    drawn = shown(found, terminal=True)
    assert drawn.pop(2) == "─" * len("speed (1/s)  learners=2  110 [100–130]  220 [200–260]")
    assert drawn == shown(found)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_nothing_measured_prints_nothing(lab: Any, is_terminal: bool) -> None:
    assert shown(table(lab({})), terminal=is_terminal) == []
    assert medians.markdown(table(lab({})), RUN) == ""
