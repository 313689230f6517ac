"""What a run holds: a line a cell, however wide, and a record in full, in words."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coresident.lab.records.schema import Control, Retraction
from coresident.lab.records.store import Stored
from coresident.lab.report import overview
from coresident.lab.verdict import words

RUN = Path("runs/a study")
REST = "a cell's records in full: coresident show 'runs/a study' CELL"


def stored(run: Any) -> list[Stored]:
    def retraction(name: str) -> Retraction | None:
        why = run.retracted.get(name)
        return Retraction(record=name, reason=why, date="2025-01-02") if why else None

    return [Stored(record, retraction(record.id), Path(f"{record.id}.json")) for record in run.records]


def printed(print_to: Callable[[Console], None], width: int = 110) -> list[str]:
    stream = io.StringIO()
    print_to(Console(file=stream, width=width, color_system=None))
    return stream.getvalue().splitlines()


def listed(run: Any, width: int = 110, claimed: tuple[str, ...] = ()) -> list[str]:
    return printed(lambda console: overview.cells(stored(run), console, RUN, claimed), width)


def test_a_cell_has_a_line_with_its_outcomes_and_the_medians_of_what_is_claimed(lab: Any) -> None:
    run = lab({})
    for repetition, memory in enumerate((800.0, 900.0, 1000.0)):
        run.add("native", repetition, {"speed": 1.0, "memory": memory}, unit="MiB")
    run.add("fork", 0, status="oom")
    run.add("fork", 1, {"speed": 2.0, "memory": 5.0}, unit="MiB")
    run.retracted[run.add("fork", 2, {"memory": 7.0}, unit="MiB").id] = "the fan was off"
    native, fork = (cell.id for cell in run.cells)
    assert listed(run, claimed=("memory", "nobody reported it")) == [
        "Cells, with medians over blocks",
        "cell             records                   memory (MiB)",
        f"{fork:<15}  1 oom, 1 ok, 1 retracted             5",
        f"{native:<15}  3 ok                               900",
        REST,
    ]


def test_without_claims_the_first_three_metrics_are_shown_and_in_a_narrow_place_fewer(lab: Any) -> None:
    run = lab({})
    run.add("native", 0, dict.fromkeys(("first", "second", "third", "fourth"), 1.0))
    header = "cell             records  first (1/s)  second (1/s)  third (1/s)"
    assert listed(run)[1] == header
    assert listed(run, 58)[1] == header.removesuffix("  third (1/s)")
    assert listed(run, 40)[0] == "Cells, with medians over blocks"
    assert listed(run, 40)[1] == "cell             records  first (1/s)"
    assert [len(listed(run, width)) for width in (110, 58, 40)] == [4, 4, 4]


def test_nothing_is_pooled_across_conditions_or_units(lab: Any) -> None:
    run = lab({})
    run.add("native", 0, {"speed": 1.0}, conditions={"driver": "1"})
    run.add("native", 1, {"speed": 3.0}, conditions={"driver": "2"})
    assert listed(run)[2].split()[-1] == "3"
    assert listed(run)[3] == "records under 2 different conditions; they are never pooled"
    run.add("native", 2, {"speed": 3.0}, unit="1/ms", conditions={"driver": "2"})
    run.add("fork", 2, {"speed": 4.0}, unit="1/ms", conditions={"driver": "2"})
    assert [line.split("ok")[1].strip() for line in listed(run)[2:4]] == ["4 1/ms", "in 1/ms and in 1/s"]


def test_of_what_was_retracted_as_a_whole_no_number_is_shown(lab: Any) -> None:
    run = lab({})
    run.retracted[run.add("native", 0, {"speed": 1.0}).id] = "the fan was off"
    assert listed(run) == ["Cells", "cell             records", f"{run.cells[0].id}  1 retracted", REST]


def test_a_record_in_full_tells_its_controls_in_words(lab: Any) -> None:
    run = lab({})
    ran = {"lock": "held", "clean": True, "pids": [7, 9], "seen": None}
    run.add("native", 0, controls={"exclusive": Control(asked="exclusive", ran=ran, state="passed")})
    lines = printed(lambda console: overview.show(stored(run), console))
    assert (
        "control     exclusive: passed; asked exclusive, ran lock held, clean true, pids (7, 9), seen -"
        in lines
    )


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("none", "none"),
        ("", "-"),
        (None, "-"),
        ([], "-"),
        ({}, "-"),
        (False, "false"),
        (12345678, "12345678"),
        (0.1 + 0.2, "0.3"),
        ([0, 1, 1], "0, 2 x 1"),
        ({"a": {"b": [1, {"c": []}]}}, "a (b (1, (c -)))"),
        ([{"mib": 2.0}, {"mib": 2.0}, {"mib": 3.0}, {"mib": 2.0}], "2 x (mib 2), (mib 3), (mib 2)"),
    ],
)
def test_no_value_reads_as_python(value: Any, told: str) -> None:
    assert words.plain(value) == told
