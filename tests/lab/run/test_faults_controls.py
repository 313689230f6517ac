"""An arm that cannot apply its own setting: refused before it runs, or invalid after it, and never a number."""

from __future__ import annotations

import os

import pytest

from coresident.errors import MachineError
from coresident.lab.records import query
from coresident.lab.verdict.model import State

CLAIM = {"expect": {"ratio": {"at_least": 1.0}}}


def test_more_cores_than_there_are_is_refused_before_anything_is_written(lab):
    cores = len(os.sched_getaffinity(0))
    study = lab.study({"a": "true"}, parameters={"cpus": cores + 1}, controls=["pinned-cpus"])
    with pytest.raises(MachineError, match=rf"asks for {cores + 1} cores .* \d+ are usable; ask for fewer"):
        lab.run(study)
    assert not lab.out.exists() and lab.ran() == []


def test_the_command_says_so_with_status_2_and_one_sentence(lab):
    status, said = lab.ends(lab.start(lab.study({"a": "true"}, parameters={"cpus": 4096})))
    assert status == 2 and "asks for 4096 cores" in said and "Traceback" not in said
    assert not lab.out.exists()


def test_a_cell_runs_on_the_cores_that_it_was_given(lab):
    lab.run(
        lab.study(
            {"a": "sleep 0.2"}, parameters={"cpus": 1}, controls=["pinned-cpus"], repetitions={"min": 1}
        )
    )
    (record,) = lab.records()
    control = record.controls["pinned-cpus"]
    assert (record.status, control.state) == ("ok", "passed")
    assert len(control.asked) == 1 and len(control.asked[0]) == 1


def test_a_cell_that_leaves_its_cores_is_invalid(lab):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a single core cannot be left")
    everywhere = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    script = f"taskset -c {everywhere} sleep 0.4\n"
    lab.run(
        lab.study(
            {"a": script},
            parameters={"cpus": 1},
            controls=["pinned-cpus"],
            repetitions={"min": 1},
            attempts=1,
        )
    )
    (record,) = lab.records()
    assert record.status == "invalid" and "could run on cores" in record.reason


@pytest.mark.parametrize(
    "answer",
    [
        {"asked": "flash", "ran": "math"},
        {"asked": 1, "ran": True},
        {"asked": "on", "ran": "on", "passed": False, "reason": "it was switched off on the way"},
    ],
)
def test_asked_is_not_ran_makes_the_record_invalid_and_keeps_it_out_of_every_aggregate(lab, answer):
    script = lab.event(event="control", name="kernel", **answer) + lab.metric(10)
    study = lab.study(
        {"a": script, "b": lab.metric(5)}, CLAIM, controls=["kernel"], repetitions={"min": 3}, attempts=1
    )
    lab.run(study)
    assert {record.status for record in lab.records("a")} == {"invalid"}
    assert all(record.controls["kernel"].state == "failed" for record in lab.records("a"))
    assert all(record.controls["kernel"].state == "unverified" for record in lab.records("b"))
    assert set(query.aggregate(lab.out).arm) == {"b"}
    assert "speed" in set(query.records(lab.out).query("arm == 'a'").metric), "it is shown"
    verdict = lab.judge(study)
    assert verdict.state is State.INVALID and "control 'kernel' of a failed" in verdict.hypotheses[0].why


def test_an_invalid_study_ends_with_status_4(lab):
    script = lab.event(event="control", name="kernel", asked="flash", ran="math") + lab.metric(10)
    study = lab.study(
        {"a": script, "b": lab.metric(5)}, CLAIM, controls=["kernel"], repetitions={"min": 3}, attempts=1
    )
    # An arm that has never been valid ends the run with its first block.
    status, said = lab.ends(lab.start(study))
    assert status == 4
    assert 'asked "flash", ran "math"' in said
    # And so it does when the verdict is asked for again.
    assert lab.ends(lab.start(study))[0] == 4
    assert len(lab.records()) == 2


def test_a_control_that_failed_is_tried_again_with_its_whole_block(lab):
    # As where a setting took only at the second try.
    script = (
        'test -e "$PWD/set" && ran=flash || ran=math; touch "$PWD/set"\n'
        + lab.event(event="control", name="kernel", asked="flash", ran="@").replace("@", "'\"$ran\"'")
        + lab.metric(10)
    )
    study = lab.study({"a": script, "b": lab.metric(5)}, CLAIM, controls=["kernel"], repetitions={"min": 3})
    lab.run(study)
    assert [record.status for record in lab.records("a")] == ["invalid", "ok", "ok", "ok"]
    verdict = lab.judge(study)
    assert verdict.state is State.SUPPORTED and verdict.hypotheses[0].findings[0].pairs == 3
