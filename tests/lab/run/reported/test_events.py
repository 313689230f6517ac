"""Reading what a cell reported: what is data, what is a fault, and that nothing doubtful passes for data."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coresident.lab.records.schema import MetricValue, Phase, Record, Series
from coresident.lab.run.reported import events, fields, lines
from coresident.lab.run.reported.events import Observed, read, series_digest
from coresident.workload import Reporter

STARTED = 1000.0
Cell = Callable[..., Observed]


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    """Write lines (objects, or raw text) to one file for each list given, and read them all."""

    def written(*files: list[Any], units: dict[str, str] | None = None) -> Observed:
        directory = tmp_path / "events"
        directory.mkdir(exist_ok=True)
        for number, content in enumerate(files):
            text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in content)
            (directory / f"{number}.jsonl").write_text(text)
        return read(directory, STARTED, units)

    return written


def metric(value: Any, name: str = "speed", unit: str = "1/s", **more: Any) -> dict[str, Any]:
    return {"event": "metric", "name": name, "value": value, "unit": unit, **more}


def clean(observed: Observed) -> bool:
    return not (observed.faults or observed.nonfinite or observed.torn)


# What is data


def test_everything_that_our_reporter_can_say_is_read_back(tmp_path: Path) -> None:
    cell = Reporter(events=tmp_path, work=tmp_path)
    with cell.phase("load"):
        cell.progress(1, 2, "steps")
    cell.metric("speed", 9.5, "1/s")
    cell.metric("total", 7, "tokens", scope="cumulative")
    cell.sample("step_ms", 3.0)
    cell.series("loss", [0.7, None, 0.5])
    cell.digest("adapter", "ab12")
    cell.control("shared", asked=True, ran=True, passed=True)
    cell.worker("a", 2000.0, 2010.0, 50, "tokens")
    cell.environment({"python": "3"})
    cell.done()
    observed = read(tmp_path, STARTED)
    assert clean(observed) and observed.done and observed.failed is None
    assert observed.metrics["speed"] == MetricValue(value=9.5, unit="1/s")
    assert observed.metrics["total"] == MetricValue(value=7.0, unit="tokens", scope="cumulative")
    assert observed.series["loss"].values == [0.7, None, 0.5]
    assert observed.digests == {"adapter": "ab12"}
    assert observed.controls["shared"].state == "passed"
    assert (observed.workers[0].work, observed.environment) == (50, {"python": "3"})
    (phase,) = observed.phases
    assert phase.name == "load" and phase.end is not None and phase.end >= phase.start


def test_forked_processes_of_one_reporter_are_read_together(tmp_path: Path) -> None:
    cell = Reporter(events=tmp_path, work=tmp_path)
    cell.metric("parent", 1, "s")
    pid = os.fork()
    if pid == 0:
        cell.metric("child", 2, "s")
        os._exit(0)
    os.waitpid(pid, 0)
    cell.done()
    observed = read(tmp_path, STARTED)
    assert clean(observed) and {"parent", "child"} <= observed.metrics.keys()


def test_one_line_of_shell_is_a_report(tmp_path: Path) -> None:
    line = '{"event": "metric", "name": "speed", "value": 9.5, "unit": "1/s"}'
    assert os.system(f"echo '{line}' >> {tmp_path}/$$.jsonl") == 0
    assert read(tmp_path, STARTED).metrics["speed"].value == 9.5


def test_no_directory_and_no_files_are_nothing_reported(tmp_path: Path) -> None:
    assert read(tmp_path, STARTED) == read(tmp_path / "nowhere", STARTED) == Observed()


def test_samples_make_a_metric_by_their_median_when_none_is_reported(cell: Cell) -> None:
    def sample(value: float, name: str = "ms") -> dict[str, Any]:
        return {"event": "sample", "name": name, "value": value, "unit": "ms"}

    observed = cell([sample(3), sample(100), sample(1), sample(2)])
    assert observed.metrics["ms"] == MetricValue(value=2.5, unit="ms", samples=[3, 100, 1, 2])
    assert cell([sample(3), sample(1), metric(9, "ms", "ms")]).metrics["ms"] == MetricValue(
        value=9, unit="ms", samples=[3, 1]
    )


def test_samples_take_the_declared_unit(cell: Cell) -> None:
    observed = cell([{"event": "sample", "name": "ms", "value": 3}], units={"ms": "ms"})
    assert observed.metrics["ms"].unit == "ms"
    assert cell([{"event": "sample", "name": "ms", "value": 3}]).metrics["ms"].unit == ""


def test_series_are_kept_up_to_a_limit_and_hashed_whole(cell: Cell) -> None:
    long = [float(i) for i in range(events.SERIES_KEPT + 1)]
    observed = cell(
        [
            {"event": "series", "name": "long", "values": long},
            {"event": "series", "name": "short", "values": [1, 2.5]},
        ]
    )
    assert observed.series["short"] == Series(digest=series_digest([1.0, 2.5]), length=2, values=[1.0, 2.5])
    assert observed.series["long"] == Series(digest=series_digest(long), length=len(long), values=[])


def test_the_digest_of_a_series_is_over_little_endian_doubles() -> None:
    packed = struct.pack("<3d", 0.1, math.nan, -0.0)
    assert series_digest([0.1, None, -0.0]) == hashlib.sha256(packed).hexdigest()
    assert series_digest([0.0]) != series_digest([-0.0])
    assert series_digest([0.1]) != series_digest([math.nextafter(0.1, 1)])


def test_phases_are_told_from_the_cells_start(cell: Cell) -> None:
    observed = cell(
        [
            {"event": "phase", "name": "load", "start": 1001.0},
            {"event": "phase", "name": "train", "t": 1002.0},
            {"event": "phase", "name": "load", "start": 1001.0, "end": 1003.5},
        ]
    )
    assert observed.phases == [Phase(name="load", start=1.0, end=3.5), Phase(name="train", start=2.0)]


def test_windows_of_workers_make_a_throughput(cell: Cell) -> None:
    def worker(name: str, start: float, end: float) -> dict[str, Any]:
        return {"event": "worker", "id": name, "start": start, "end": end, "work": 100, "unit": "tokens"}

    # Each did 10 a second, but not at the same time: together they did 10 a second too.
    observed = cell([worker("a", 1000, 1010)], [worker("b", 1010, 1020)])
    assert observed.metrics["throughput"] == MetricValue(value=10.0, unit="tokens/s")
    own = cell([worker("a", 1000, 1010), metric(3, "speed", "1/s")], [])
    assert "throughput" not in own.metrics


def test_the_environments_of_several_processes_are_joined_and_differences_kept(cell: Cell) -> None:
    def told(**values: Any) -> dict[str, Any]:
        return {"event": "environment", "values": values}

    observed = cell([told(python="3.11", a=1)], [told(python="3.12", b=2)], [told(python="3.11")])
    assert observed.environment == {
        "python": "3.11",
        "a": 1,
        "b": 2,
        "differing": {"python": ["3.11", "3.12"]},
    }


# What is never data


@pytest.mark.parametrize(
    "token", ["NaN", "Infinity", "-Infinity", "1e400", "-1e999", "1" + "0" * 400], ids=lambda token: token[:9]
)
@pytest.mark.parametrize("event", ["metric", "sample"])
def test_a_number_that_is_not_finite_is_no_data_and_named_as_such(cell: Cell, event: str, token: str) -> None:
    line = f'{{"event": "{event}", "name": "speed", "value": {token}, "unit": "1/s"}}\n'
    observed = cell([{"event": "done"}, line])
    assert observed.metrics == {} and observed.samples == {}
    assert observed.faults == []
    assert len(observed.nonfinite) == 1
    assert observed.nonfinite[0].startswith(f"0.jsonl line 2: {event} 'speed': value: ")


@pytest.mark.parametrize("value", ["9.5", "9,5", True, False, None, [9.5], {"value": 9.5}, "", "NaN"])
def test_what_is_not_a_number_is_no_data_and_a_fault(cell: Cell, value: Any) -> None:
    observed = cell([metric(value)])
    assert (observed.metrics, observed.nonfinite) == ({}, [])
    assert observed.faults[0].startswith("0.jsonl line 1: metric 'speed': value: ")
    assert "is not a number" in observed.faults[0]


def test_a_decimal_comma_is_told_as_such(cell: Cell) -> None:
    observed = cell(['{"event": "metric", "name": "speed", "value": 9,5, "unit": "1/s"}\n'])
    assert observed.metrics == {}
    assert "line 1 is not JSON: a number with a decimal comma" in observed.faults[0]


def test_a_series_may_hold_null_but_nothing_else_that_is_no_finite_number(cell: Cell) -> None:
    nonfinite = cell(['{"event": "series", "name": "loss", "values": [1.0, NaN]}\n'])
    assert nonfinite.series == {} and "value 1: nan" in nonfinite.nonfinite[0]
    text = cell([{"event": "series", "name": "loss", "values": [1.0, "2"]}])
    assert text.series == {} and 'value 1: "2" is not a number' in text.faults[0]


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"event": "metrc", "name": "a"}, "unknown event \"metrc\"; did you mean 'metric'?"),
    ({"name": "a"}, "unknown event null"),
    ({"event": ["metric"]}, "unknown event"),
    ({"event": "metric", "name": "a", "value": 1}, "metric lacks the field 'unit'"),
    (metric(1, units="s"), "metric has no field 'units'; did you mean 'unit'?"),
    (metric(1, scope="total"), '"total" is none of session, cumulative'),
    (metric(1, name=""), "is not a name"),
    (metric(1, name="a\nb"), "is not a name"),
    (metric(1, name="x" * 201), "is not a name"),
    (metric(1, name=7), "7 is not a string"),  # type: ignore[arg-type]
    (metric(1, name="wall_seconds"), "the lab's own measurement"),
    (metric(1, t="now"), '"now" is not a number'),
    ({"event": "done", "status": "ok"}, "done has no field 'status'"),
    ({"event": "failed", "status": "ok", "reason": ""}, '"ok" is none of failed, oom, nonfinite'),
    ({"event": "digest", "name": "a", "value": 12}, "12 is not a string"),
    ({"event": "control", "name": "a", "asked": 1}, "control lacks the field 'ran'"),
    ({"event": "control", "name": "a", "asked": 1, "ran": 1, "passed": "yes"}, "none of true, false, null"),
    ({"event": "environment", "values": []}, "[] is not an object"),
    ({"event": "series", "name": "a", "values": "1,2"}, "is not a list"),
    ({"event": "progress", "done": "1", "total": 2}, "is not a number"),
    ({"event": "worker", "id": "a", "start": 1002, "end": 1001, "work": 1, "unit": ""}, "before it starts"),
    ({"event": "worker", "id": "a", "start": 1001, "end": 1002, "work": -1, "unit": ""}, "less than nothing"),
    ({"event": "worker", "id": "a", "start": 5, "end": 6, "work": 1, "unit": ""}, "before the cell began"),
    ({"event": "phase", "name": "a"}, "lacks the field 'start'"),
    ({"event": "phase", "name": "a", "start": 5}, "before the cell began"),
]


@pytest.mark.parametrize(("line", "sentence"), FAULTS, ids=lambda given: str(given)[:40])
def test_a_line_that_is_wrong_in_any_way_is_a_fault_that_names_it(
    cell: Cell, line: dict[str, Any], sentence: str
) -> None:
    observed = cell([metric(1, "good"), line])
    assert len(observed.faults) == 1
    assert observed.faults[0].startswith("0.jsonl line 2: ")
    assert sentence in observed.faults[0]
    assert list(observed.metrics) == ["good"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"event": "done"\n', "is not JSON"),
        ('{"event": "do{"event": "done"}\n', "is not JSON"),
        ('"done"\n', "is not a JSON object"),
        (
            '{"event": "metric", "name": "a", "value": 1, "value": 2, "unit": ""}\n',
            "has the key 'value' twice",
        ),
        ("[" * 200_000 + "\n", "is not JSON"),
        (
            '{"event": "failed", "status": "failed", "reason": "' + "x" * (1 << 20) + '"}\n',
            "is longer than 1 MiB",
        ),
        ('{"event": "environment", "values": {"a": {"b": NaN}}}\n', "a number that is not finite"),
        (
            '{"event": "worker", "id": "a", "start": NaN, "end": 1, "work": 1, "unit": ""}\n',
            "not a finite number",
        ),
    ],
    ids=lambda given: given[:30],
)
def test_a_line_that_cannot_be_read_is_a_fault(cell: Cell, line: str, sentence: str) -> None:
    observed = cell([line, {"event": "done"}])
    assert len(observed.faults) == 1 and sentence in observed.faults[0] and "line 1" in observed.faults[0]
    assert observed.done


def test_bytes_that_are_no_text_are_a_fault(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"event": "done\xff"}\n')
    assert read(tmp_path, STARTED).faults == ["a.jsonl line 1 is not UTF-8"]


def test_a_series_may_be_longer_than_other_lines_but_not_endless(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = {"event": "series", "name": "long", "values": [0.123456789012345] * 100_000}
    assert clean(cell([long]))
    monkeypatch.setattr(lines, "SERIES_LIMIT", 1 << 20)
    assert "line 1 is longer than 1 MiB" in cell([long, {"event": "done"}]).faults[0]


def test_a_file_that_is_too_large_is_not_read(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "FILE_LIMIT", 1 << 20)
    observed = cell([metric(1), *[" " * 1000 + "\n"] * 1100])
    assert (observed.metrics, observed.faults) == ({}, ["0.jsonl is larger than 1 MiB"])


def test_what_is_not_a_file_of_events_is_a_fault_and_never_waited_for(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "link.jsonl").symlink_to("/etc/passwd")
    (tmp_path / "dir.jsonl").mkdir()
    faults = read(tmp_path, STARTED).faults
    assert [fault.split()[0] for fault in faults] == ["dir.jsonl", "link.jsonl", "pipe.jsonl", "results.json"]
    assert "named *.jsonl" in faults[-1]


# Torn lines


@pytest.mark.parametrize("cut", range(1, len(json.dumps(metric(1, "last")))))
def test_a_last_line_cut_short_anywhere_is_torn_and_no_data(cell: Cell, cut: int) -> None:
    observed = cell([metric(1, "whole"), json.dumps(metric(1, "last"))[:cut]])
    assert list(observed.metrics) == ["whole"]
    assert (observed.faults, observed.torn) == ([], ["0.jsonl line 2 is cut short"])


def test_a_whole_last_line_without_its_newline_is_whole(cell: Cell) -> None:
    observed = cell([metric(1, "whole"), json.dumps(metric(1, "last"))])
    assert clean(observed) and set(observed.metrics) == {"whole", "last"}


# Where processes could disagree


@pytest.mark.parametrize(
    "event",
    [
        metric(1),
        {"event": "series", "name": "speed", "values": [1]},
        {"event": "digest", "name": "speed", "value": "ab"},
        {"event": "worker", "id": "speed", "start": 1001, "end": 1002, "work": 1, "unit": ""},
    ],
    ids=lambda event: event["event"],
)
def test_a_second_report_of_the_same_thing_is_a_fault_and_not_the_last_one_wins(
    cell: Cell, event: dict[str, Any]
) -> None:
    observed = cell([event], [event])
    assert observed.faults == [
        f"1.jsonl line 1: {event['event']} 'speed' was already reported in 0.jsonl line 1"
    ]


def test_a_metric_has_one_scope(cell: Cell) -> None:
    observed = cell([metric(1), metric(2, scope="cumulative")])
    assert observed.metrics["speed"].value == 1 and len(observed.faults) == 1


def test_units_are_the_declared_ones_and_the_same_everywhere(cell: Cell) -> None:
    assert "declared in 'ms'" in cell([metric(1)], units={"speed": "ms"}).faults[0]
    mixed = [{"event": "sample", "name": "a", "value": 1, "unit": unit} for unit in ("s", "ms")]
    assert "in 'ms' here and in 's' before" in cell(mixed).faults[0]
    other = cell([metric(1, "a", "ms"), {"event": "sample", "name": "a", "value": 1, "unit": "s"}])
    assert "its samples are in 's'" in other.faults[0]


def test_the_first_failure_in_time_is_the_cause(cell: Cell) -> None:
    late = {"event": "failed", "status": "failed", "reason": "a learner is gone", "t": 1009.0}
    early = {"event": "failed", "status": "oom", "reason": "no memory", "t": 1008.0}
    observed = cell([late], [early])
    assert (observed.failed, observed.failed_at) == (("oom", "no memory"), 1008.0)


def control(asked: Any, ran: Any, **more: Any) -> dict[str, Any]:
    return {"event": "control", "name": "c", "asked": asked, "ran": ran, **more}


@pytest.mark.parametrize(
    ("line", "state"),
    [
        (control(4, 4), "passed"),
        (control(4, 4.0), "passed"),
        (control({"a": [1, 2]}, {"a": [1, 2.0]}), "passed"),
        (control(4, 5), "failed"),
        (control(1, True), "failed"),
        (control("4", 4), "failed"),
        (control([1, True], [1, 1]), "failed"),
        (control(4, None), "unverified"),
        (control(4, 4, passed=False), "failed"),
        (control(4, 5, passed=True), "passed"),
        (control(4, 4, passed=None), "unverified"),
    ],
    ids=lambda given: str(given)[-40:],
)
def test_a_control_is_asked_against_ran_unless_the_cell_decides(
    cell: Cell, line: dict[str, Any], state: str
) -> None:
    found = cell([line]).controls["c"]
    assert found.state == state
    assert bool(found.reason) == (state != "passed")


def test_the_worst_of_several_answers_to_a_control_counts(cell: Cell) -> None:
    passed, failed, unknown = control(1, 1), control(1, 2, reason="why"), control(1, None)
    assert cell([passed], [failed], [unknown]).controls["c"].reason == "why"
    assert cell([passed], [unknown], [passed]).controls["c"].state == "unverified"


# Bounds, and anything at all


def test_faults_are_counted_but_not_kept_without_end(cell: Cell) -> None:
    observed = cell([{"event": "x"}] * 100)
    assert len(observed.faults) == events.FAULTS_KEPT + 1
    assert observed.faults[-1] == "and 80 more"


def test_samples_and_phases_are_bounded_and_the_median_is_over_all(cell: Cell) -> None:
    count = events.SAMPLES_KEPT + 3
    samples = [{"event": "sample", "name": "a", "value": i} for i in range(count)]
    phases = [{"event": "phase", "name": "p", "start": STARTED + i} for i in range(events.PHASES_KEPT + 5)]
    observed = cell(samples, phases)
    assert len(observed.metrics["a"].samples) == events.SAMPLES_KEPT
    assert observed.metrics["a"].value == (count - 1) / 2
    assert len(observed.phases) == events.PHASES_KEPT and len(observed.notes) == 2
    assert clean(observed)


def test_any_bytes_at_all_are_read_without_an_error_and_give_storable_values(tmp_path: Path) -> None:
    rng = random.Random(0)
    good = [json.dumps(line) for line, _ in FAULTS] + [json.dumps(metric(1, f"m{i}")) for i in range(20)]
    for round_ in range(150):
        text = bytearray("\n".join(rng.sample(good, 8)).encode())
        for _ in range(rng.randrange(6)):
            text[rng.randrange(len(text))] = rng.choice(b'0123456789{}[]",:eENaI\n\xff')
        (tmp_path / "a.jsonl").write_bytes(text)
        observed = read(tmp_path, STARTED)
        for value in observed.metrics.values():
            assert math.isfinite(value.value), round_
        json.dumps(observed.environment, allow_nan=False)


def test_every_event_of_the_reporter_is_in_the_table() -> None:
    said = {"phase", "progress", "metric", "sample", "series", "digest", "control", "worker", "environment"}
    assert fields._FIELDS.keys() == said | {"failed", "done"}
    assert all(hasattr(events._Reader, f"_{event}") for event in fields._FIELDS)
    assert Record.model_fields["phases"] is not None
