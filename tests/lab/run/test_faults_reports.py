"""What a cell says of itself, played for real: nothing doubtful becomes data, whatever its exit code."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest

from coresident.lab.records import query
from coresident.lab.study.load import load_text
from coresident.lab.verdict.model import State

CLAIM = {"expect": {"ratio": {"at_least": 1.0}}}


def one(lab, script, claim=CLAIM, **keys):
    """Run `script` once as arm a beside a good arm b: its record."""
    study = lab.study({"a": script, "b": lab.metric(5)}, claim, repetitions={"min": 1}, attempts=1, **keys)
    lab.run(study)
    (record,) = lab.records("a")
    assert lab.records("b")[0].status == "ok"
    assert lab.judge(study).hypotheses[0].state in (State.UNDECIDED, State.INVALID)
    return record


@pytest.mark.parametrize("script", ["true", "echo speed: 9.5"])
def test_exit_0_without_the_metric_that_a_hypothesis_is_about_has_failed(lab, script):
    record = one(lab, script)
    assert record.status == "failed"
    assert record.reason == "it did not report 'speed', which a hypothesis is about"


@pytest.mark.parametrize(
    ("word", "status", "reason"),
    [
        ("NaN", "nonfinite", "nan is not a finite number"),
        ("Infinity", "nonfinite", "inf is not a finite number"),
        ("-Infinity", "nonfinite", "-inf is not a finite number"),
        ("1e400", "nonfinite", "inf is not a finite number"),
        ("""'"9.5"'""", "failed", '"9.5" is not a number (write it without quotes, with a decimal point)'),
        ("true", "failed", "true is not a number"),
        ("null", "failed", "null is not a number"),
        ("9,5", "failed", "a number with a decimal comma (write a point, whatever the locale)"),
    ],
)
def test_a_metric_that_is_no_finite_number_is_never_data(lab, word, status, reason):
    record = one(lab, lab.metric(word))
    assert record.status == status
    assert reason in record.reason and ".jsonl line 1" in record.reason
    assert "speed" not in record.metrics
    table = query.aggregate(lab.out)
    assert set(table[table.metric == "speed"].arm) == {"b"}


def test_one_bad_value_among_good_ones_spoils_the_cell(lab):
    record = one(lab, lab.metric(9.5) + lab.metric("NaN", "other"))
    assert record.status == "nonfinite"


def test_a_good_value_followed_by_a_failing_exit_code_has_failed(lab):
    record = one(lab, lab.metric(9.5) + "exit 3\n")
    assert (record.status, record.reason) == ("failed", "exit code 3")
    assert set(query.aggregate(lab.out).arm) == {"b"}


def test_bimodal_samples_are_all_kept_beside_the_median_that_hides_them(lab):
    samples = [15.0, 156.0] * 3 + [15.0]
    script = "".join(lab.event(event="sample", name="speed", value=value, unit="1/s") for value in samples)
    record = one(lab, script)
    assert record.metrics["speed"].value == 15.0
    assert record.metrics["speed"].samples == samples


def test_workers_one_after_another_are_not_summed_to_more_than_the_device_did(lab):
    # Three workers of 100 pieces in a second each, in turn: 100 a second together, and not 300.
    line = '{"event": "worker", "id": "%d", "start": %.3f, "end": %.3f, "work": 100, "unit": "pieces"}\\n'.replace(
        '"', '\\"'
    )
    program = f"""'{{ for (i = 0; i < 3; i++) printf "{line}", i, $1 + i, $1 + i + 1 }}'"""
    record = one(
        lab,
        f'awk {program} /proc/uptime >> "$CORESIDENT_EVENTS/workers.jsonl"\n',
        {"metric": "throughput", "expect": {"value": {"at_least": 1.0}}},
    )
    assert record.status == "ok" and len(record.workers) == 3
    assert record.metrics["throughput"].value == pytest.approx(100, rel=0.01)
    assert record.metrics["throughput"].unit == "pieces/s"


WORKLOAD = """
    import os, time
    from coresident.workload import Metric, Needs, Parameters, Workload

    class Given(Parameters):
        code: str
        workers: int = 1

    def run(parameters, cell):
        exec(parameters.code)

    workload = Workload("played", "runs code", Given, (Metric("speed", "1/s", "more", ""),), frozenset({"shared"}),
                        run, lambda parameters: Needs(workers=parameters.workers))
"""


@pytest.fixture
def played(lab, monkeypatch):
    """A lab to which another package has brought a workload: a function from its code to the record of one cell."""
    site = lab.place / "site"
    (site / "played-1.0.dist-info").mkdir(parents=True)
    (site / "played_workload.py").write_text(textwrap.dedent(WORKLOAD))
    (site / "played-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: played\nVersion: 1.0\n"
    )
    (site / "played-1.0.dist-info" / "entry_points.txt").write_text(
        "[coresident.workloads]\nplayed = played_workload:workload\n"
    )
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)

    def run(code, controls=(), **parameters):
        values = {
            "arms": {"a": {"code": textwrap.dedent(code), **parameters}},
            "repetitions": {"min": 1}, "attempts": 1, "controls": list(controls),
        }  # fmt: skip
        lab.run(
            load_text("study: sample\nquestion: q?\nworkload: played\narms: {}\n", "sample", values=values)
        )
        (record,) = lab.records()
        return record

    yield run
    sys.modules.pop("played_workload", None)


def test_a_workload_that_exits_with_0_behind_our_back_is_not_done(played):
    record = played("cell.metric('speed', 9.5, '1/s'); os._exit(0)")
    assert record.status == "failed"
    assert "no `done` event" in record.reason


def test_a_workload_that_returns_is_done(played):
    record = played("cell.metric('speed', 9.5, '1/s')")
    assert (record.status, record.metrics["speed"].value) == ("ok", 9.5)
    assert record.environment["executable"] == sys.executable, "told from inside the cell's interpreter"


@pytest.mark.parametrize("lost", ["os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_three_of_four_workers_is_a_failure_and_no_lower_throughput(played, lost):
    code = f"""
        children = []
        for number in range(4):
            child = os.fork()
            if child == 0:
                if number == 2:
                    {lost}
                start = time.monotonic()
                time.sleep(0.05)
                cell.worker(str(number), start, time.monotonic(), 100.0, "tokens")
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        cell.metric("speed", 9.5, "1/s")
    """
    record = played(code, workers=4)
    assert (record.status, record.reason) == ("failed", "3 of its 4 workers reported")
    assert len(record.workers) == 3, "what was seen is shown"


def test_a_control_that_the_workload_did_not_answer_is_unverified_and_said_so(played):
    record = played("cell.metric('speed', 9.5, '1/s')", controls=["shared"])
    assert record.status == "ok"
    assert (record.controls["shared"].state, record.controls["shared"].reason) == (
        "unverified", "the workload did not report it",
    )  # fmt: skip


def test_a_cell_cannot_answer_a_control_of_the_lab_s_own(lab):
    forged = lab.event(event="control", name="pinned-cpus", asked="unpinned", ran="unpinned", passed=True)
    pinned_itself = "taskset -c 0 sleep 0.2\n"
    record = one(lab, forged + pinned_itself + lab.metric(9.5), controls=["pinned-cpus"])
    assert record.controls["pinned-cpus"].state == "failed"
    assert record.status == "invalid" and "could run on cores 0, asked was unpinned" in record.reason


def test_output_of_any_kind_is_kept_and_taken_for_nothing(lab):
    record = one(lab, "printf 'speed: 9,5\\n\\377\\000\\n'\n" + lab.metric(9.5))
    assert record.metrics["speed"].value == 9.5
    place = Path(lab.out, "cells", record.cell.id, "r0", "a1", "stdout")
    assert place.read_bytes() == b"speed: 9,5\n\xff\x00\n"
