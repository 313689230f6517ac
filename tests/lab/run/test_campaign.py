"""A whole run: what is measured, in which order, what a second run adds, and when it ends."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest

from coresident.errors import MachineError, UserError
from coresident.lab.records import known
from coresident.lab.records.files import Disk
from coresident.lab.records.schema import CellRef
from coresident.lab.records.store import Store
from coresident.lab.run import prepare as preparing
from coresident.lab.run.edges import Edges
from coresident.lab.study.schema import Study
from coresident.lab.verdict.model import State
from coresident.workload import workload

ALL = {("a", 0): 1, ("b", 0): 1, ("a", 1): 1, ("b", 1): 1}


def test_every_cell_is_measured_once_a_block_and_the_directory_says_all(lab):
    finished = lab.run(lab.study({"a": "true", "b": "true"}))
    assert (finished.measured, finished.stopped) == (4, "")
    assert lab.times() == ALL
    assert [record.status for record in lab.records()] == ["ok"] * 4
    assert {path.name for path in lab.out.iterdir()} == {
        "study.yaml", "plan.json", "records", "cells", "lock", "lock.holder",
    }  # fmt: skip
    one = lab.records("a")[0]
    place = lab.out / "cells" / one.cell.id / "r0" / "a1"
    assert {path.name for path in place.iterdir()} == {"cell.json", "events", "telemetry", "stdout", "stderr"}
    assert json.loads((place / "cell.json").read_text())["cell"]["hash"] == one.cell.hash


def test_the_second_block_runs_the_first_one_s_order_backwards(lab):
    lab.run(lab.study({"a": "true", "b": "true", "c": "true"}))
    order = [arm for arm, _ in lab.ran()]
    assert order[:3] == order[3:][::-1]
    assert [record.block.position for record in lab.records()] == [0, 1, 2, 0, 1, 2]


def test_a_second_run_measures_nothing_and_more_repetitions_only_what_they_add(lab):
    arms = {"a": "true", "b": "true"}
    lab.run(lab.study(arms))
    assert lab.run(lab.study(arms)).measured == 0
    assert lab.run(lab.study(arms, repetitions={"min": 3})).measured == 2
    assert lab.times() == {**ALL, ("a", 2): 1, ("b", 2): 1}


def test_a_run_that_was_begun_before_a_parameter_came_goes_on(lab, monkeypatch):
    arms, older = {"a": lab.metric(1), "b": lab.metric(2)}, workload("command")
    study = lab.study(arms, {"expect": {"value": {"at_least": 0.5}}})
    lab.run(study)
    before, ids = lab.times(), {one.cell.id for one in lab.records()}

    class Newer(older.parameters):
        umask: int = 0o22

    monkeypatch.setattr(preparing, "workload", lambda name: replace(older, parameters=Newer))
    assert [one.state for one in lab.judge(study).hypotheses] != [State.PENDING]
    lab.run(study)
    assert lab.times() == before
    lab.run(lab.study(arms, repetitions={"min": 3}))
    assert {one.cell.id for one in lab.records()} == ids
    changed = {name: {"shell": arm, "umask": 7} for name, arm in arms.items()}
    with pytest.raises(UserError, match=r"arms\.a\.(shell changed|umask was added)"):
        lab.run(lab.study(changed))
    asked = lab.study(arms, parameters={"umask": 7})
    assert not ids & {cell.id for cell in preparing.expanded(asked, Store(lab.out).records())[1]}


def test_what_was_measured_with_a_newer_parameter_is_not_what_another_default_of_it_asks_for(
    lab, monkeypatch
):
    arms, older = {"a": lab.metric(1), "b": lab.metric(2)}, workload("command")

    def version(default: int) -> None:
        class Newer(older.parameters):
            umask: int = default

        monkeypatch.setattr(preparing, "workload", lambda name: replace(older, parameters=Newer))

    claim = {"expect": {"value": {"at_least": 0.5}}}
    lab.run(lab.study(arms, repetitions={"min": 1}))
    version(0o22)
    lab.run(lab.study(arms, claim))
    assert [one.cell.parameters.get("umask") for one in lab.records("a")] == [None, 0o22]
    before, ids = lab.times(), {one.cell.id for one in lab.records()}
    lab.run(lab.study(arms, claim))
    assert lab.times() == before
    version(0o7)
    assert [one.state for one in lab.judge(lab.study(arms, claim)).hypotheses] == [State.PENDING]
    lab.run(lab.study(arms, claim))
    assert lab.times() == dict.fromkeys(before, 2)
    newest = [one for one in lab.records() if one.cell.id not in ids]
    assert [one.cell.parameters["umask"] for one in newest] == 4 * [0o7]


def test_names_of_thousands_of_cells_are_found_without_comparing_each_with_each(lab, monkeypatch):
    class Newer(workload("command").parameters):
        umask: int = 0o22

    older, looked = workload("command"), []
    loaded = lab.study({"a": "true"}, factors={"cpus": list(range(300))})
    (lab.out / "records").mkdir(parents=True)
    cells = preparing.expanded(loaded)[1]
    records = [SimpleNamespace(cell=CellRef(**{**vars(one), "factors": dict(one.factors)})) for one in cells]
    canonical = known.canonical
    monkeypatch.setattr(known, "canonical", lambda value: looked.append(1) or canonical(value))
    monkeypatch.setattr(preparing, "workload", lambda name: replace(older, parameters=Newer))
    found = preparing.expanded(loaded, records)[1]
    assert [one.id for one in found] == [one.id for one in cells]
    assert len(looked) < 10 * len(cells)


def test_records_of_other_controls_are_not_those_of_a_cell(lab):
    arms = {"a": lab.metric(1)}
    lab.run(lab.study(arms))
    (ours,) = {one.cell.id for one in lab.records()}
    (other,) = preparing.expanded(lab.study(arms, controls=["finite"]), Store(lab.out).records())[1]
    assert other.id != ours


def test_a_changed_parameter_is_refused_and_the_directory_is_left_as_it_was(lab):
    lab.run(lab.study({"a": "true", "b": "true"}, parameters={"env": {"N": 1}}))
    before = {path: path.read_bytes() for path in lab.out.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"parameters.env.N changed from 1 to 2; use another --out"):
        lab.run(lab.study({"a": "true", "b": "true"}, parameters={"env": {"N": 2}}))
    with pytest.raises(UserError, match=r"arms.b.shell changed"):
        lab.run(lab.study({"a": "true", "b": "false"}, parameters={"env": {"N": 1}}))
    with pytest.raises(UserError, match=r"factors changed from \[\] to \[\"env.M\"\]"):
        lab.run(lab.study({"a": "true", "b": "true"}, parameters={"env": {"N": 1}}, factors={"env.M": [1]}))
    assert {path: path.read_bytes() for path in lab.out.rglob("*") if path.is_file()} == before
    assert lab.times() == ALL


def test_a_level_that_is_added_is_measured_and_the_others_stay(lab):
    arms = {"a": "true", "b": "true"}
    lab.run(lab.study(arms, factors={"env.N": [1]}))
    assert lab.run(lab.study(arms, factors={"env.N": [1, 2]})).measured == 4
    assert {record.block.generation for record in lab.records()} == {0}


def test_an_arm_that_is_added_measures_its_blocks_anew_as_a_new_generation(lab):
    lab.run(lab.study({"a": "true", "b": "true"}))
    finished = lab.run(lab.study({"a": "true", "b": "true", "c": "true"}))
    assert finished.measured == 6
    assert lab.times() == {**dict.fromkeys(ALL, 2), ("c", 0): 1, ("c", 1): 1}
    assert sorted((r.cell.arm, r.block.generation) for r in lab.records() if r.block.repetition == 0) == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 1),
    ]  # fmt: skip
    assert any("generation 2: c-" in note and "was added" in note for note in lab.watch.notes)


def test_a_program_that_was_edited_is_other_conditions_and_a_new_generation_wherever_it_lies(lab):
    place = lab.place / "elsewhere"
    place.mkdir()
    (place / "work.sh").write_text("exit 0\n")
    arms = {name: {"argv": ["sh", "work.sh"], "cwd": str(place)} for name in ("a",)}
    lab.run(lab.study(arms, repetitions={"min": 1}))
    (place / "work.sh").write_text("exit 0 # now another\n")
    assert lab.run(lab.study(arms, repetitions={"min": 1})).measured == 1
    first, second = lab.records()
    assert (first.block.generation, second.block.generation) == (0, 1)
    assert first.conditions.hash != second.conditions.hash


BROKEN = {"a": "echo fine; echo no such model >&2; echo >&2; exit 3", "b": "true", "c": "true"}


def test_an_arm_that_always_fails_stops_the_run_once_the_others_of_its_block_are_measured(lab):
    finished = lab.run(lab.study(BROKEN, attempts=2))
    assert {r.status for r in lab.records("a")} == {"failed"}
    assert lab.times()["a", 0] == 2
    assert {repetition for _, repetition in lab.ran()} == {0}, "no block is begun beside a broken arm"
    # The others belong to the generation in which it failed for good.
    newest = [r for r in lab.records() if r.block.generation == 1]
    assert {r.cell.arm: r.status for r in newest} == {"a": "failed", "b": "ok", "c": "ok"}
    name = lab.records("a")[0].cell.id
    assert finished.stopped == (
        f"a failed in all 2 attempts: exit code 3; its output: coresident logs {lab.out} {name}, "
        "which ends: no such model"
    )
    again = lab.run(lab.study(BROKEN, attempts=2))
    assert (again.measured, again.stopped) == (0, finished.stopped)


def test_a_broken_arm_is_measured_anew_with_retry_and_the_run_goes_on_once_it_is_mended(lab):
    study = lab.study({"a": 'test -e "$PWD/well"', "b": "true"}, attempts=2)
    assert "a failed in all 2 attempts" in lab.run(study).stopped
    (lab.place / "well").touch()
    assert lab.run(study).measured == 0
    mended = lab.run(study, retry=True)
    assert (mended.stopped, mended.measured) == ("", 4)


def test_an_arm_that_worked_once_is_measured_to_the_end_although_it_fails_later(lab):
    once = 'test ! -e "$PWD/done" && touch "$PWD/done"'
    finished = lab.run(lab.study({"a": once, "b": "true"}, attempts=1, repetitions={"min": 3}))
    assert finished.stopped == ""
    assert [r.status for r in lab.records("a")] == ["ok", "failed", "failed"]
    assert len(lab.records("b")) == 3


def test_a_claim_that_changes_or_comes_after_data_is_told_before_anything_is_measured(lab):
    arms = {"a": lab.metric(10), "b": lab.metric(5)}
    study = lab.study(arms, {"expect": {"ratio": {"at_least": 1.0}}}, repetitions={"min": 3})
    lab.run(study)
    assert lab.watch.notes == []
    lab.run(study)
    assert lab.watch.notes == []
    lab.run(lab.study(arms, {"expect": {"ratio": {"at_least": 1.5}}}, repetitions={"min": 3}))
    assert lab.watch.notes == ["H was changed after data was seen: it is marked post hoc for good"]


def test_blocks_that_are_too_few_for_a_claim_are_told_beforehand(lab):
    arms = {"a": lab.metric(10), "b": lab.metric(5)}
    lab.run(lab.study(arms, {"expect": {"ratio": {"at_least": 1.0}}}, repetitions={"min": 2}))
    assert lab.watch.notes == [
        "2 blocks can never decide H: an interval needs 3 (set repetitions.min to 3 or more)"
    ]


def test_changed_conditions_are_told_by_what_changed(lab, monkeypatch):
    study = lab.study({"a": "true"}, repetitions={"min": 1})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    lab.run(study)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    lab.run(study)
    (note,) = lab.watch.notes
    assert note.startswith("block 1, generation 2: conditions changed (")
    assert "OMP_NUM_THREADS: 1 -> 2)" in note


def test_an_outcome_is_not_repeated_unless_retry_asks_for_it(lab):
    # Ends well once the file is there: as where memory was short only the first time.
    script = 'test -e "$PWD/well" || ' + lab.event(event="failed", status="oom", reason="too much")
    study = lab.study({"a": script, "b": "true"}, repetitions={"min": 1})
    lab.run(study)
    assert lab.records("a")[0].status == "oom"
    assert lab.run(study).measured == 0
    (lab.place / "well").touch()
    assert lab.run(study, retry=True).measured == 2, "the whole block: pairs never cross generations"
    assert [(r.status, r.block.generation) for r in lab.records("a")] == [("oom", 0), ("ok", 1)]
    assert lab.run(study, retry=True).measured == 0


def test_retry_still_ends_for_an_arm_that_keeps_running_out_of_memory(lab):
    script = lab.event(event="failed", status="oom", reason="too much")
    study = lab.study({"a": script, "b": "true"}, repetitions={"min": 1})
    lab.run(study)
    assert lab.run(study, retry=True).measured == 2
    assert [r.status for r in lab.records("a")] == ["oom", "oom"]


def test_a_retracted_record_is_measured_again_with_its_block(lab):
    from coresident.lab.records.store import Store

    study = lab.study({"a": "true", "b": "true"})
    lab.run(study)
    Store(lab.out).retract(lab.records("a")[0].id, "the fan was off", "2026-01-01")
    assert lab.run(study).measured == 2
    assert lab.times() == {**ALL, ("a", 0): 2, ("b", 0): 2}


def test_the_budget_ends_the_run_at_a_block_s_edge(lab):
    # The first cell takes longer than the whole budget, and its block is finished all the same.
    study = lab.study({"a": "sleep 0.3", "b": "sleep 0.3"}, repetitions={"min": 3})
    finished = lab.run(study, budget_minutes=0.1 / 60)
    assert finished.stopped.startswith("the budget of ")
    assert lab.times() == {("a", 0): 1, ("b", 0): 1}
    assert lab.run(study).measured == 4
    assert set(lab.times().values()) == {1}


def test_until_stops_both_arms_together_after_blocks_that_agree(lab):
    limits = {"min": 3, "max": 9, "until": {"half_width": 0.05}}
    claim = {"expect": {"ratio": {"at_least": 1.0}}}
    study = lab.study({"a": lab.metric(10), "b": lab.metric(5)}, claim, repetitions=limits)
    lab.run(study)
    assert len(lab.records("a")) == len(lab.records("b")) == 4, (
        "narrow twice: with and without the newest block"
    )
    assert lab.run(study).measured == 0


def test_until_goes_on_to_the_limit_where_blocks_disagree(lab):
    limits = {"min": 3, "max": 5, "until": {"half_width": 0.05}}
    claim = {"expect": {"ratio": {"at_least": 1.0}}}
    noisy = 'n=$(wc -l < "$RAN")\n' + lab.metric('"$n"')
    study = lab.study({"a": noisy, "b": lab.metric(5)}, claim, repetitions=limits)
    lab.run(study)
    assert len(lab.records("a")) == len(lab.records("b")) == 5
    lab.run(study)
    told = [note for note in lab.watch.notes if note.startswith("going on after 3 blocks, to 5 at most")]
    assert len(told) == 1, "said once, and not by a run that measures nothing"


def test_a_metric_is_asked_of_those_cells_only_that_a_hypothesis_is_about(lab):
    claim = {"expect": {"value": {"at_least": 1.0}}}
    lab.run(lab.study({"a": lab.metric(2), "b": "true"}, claim, repetitions={"min": 3}))
    assert {record.status for record in lab.records()} == {"ok"}


def test_a_factor_of_numbers_reaches_the_program_and_the_lab_s_own_variables_stay(lab):
    script = lab.metric('"$N"') + lab.metric('"${#CORESIDENT_EVENTS}"', "length")
    arms = {
        "a": {
            "shell": 'echo "$CORESIDENT_EVENTS" >> "$RAN"\n' + script,
            "env": {"CORESIDENT_EVENTS": "/nowhere"},
        }
    }
    lab.run(lab.study(arms, factors={"env.N": [4, 8.5]}, repetitions={"min": 1}))
    assert sorted(record.metrics["speed"].value for record in lab.records()) == [4, 8.5]


def test_a_directory_that_is_no_run_directory_is_refused_and_left_alone(lab):
    lab.out.mkdir()
    (lab.out / "study.yaml").write_text("mine")
    with pytest.raises(UserError, match=r"holds 'study.yaml' and is no run directory; use another --out"):
        lab.run(lab.study({"a": "true"}))
    assert [path.name for path in lab.out.iterdir()] == ["study.yaml"]
    assert (lab.out / "study.yaml").read_text() == "mine"


def test_a_run_that_is_asked_to_stop_before_a_cell_starts_none(lab):
    # Between two cells nobody is there to be waited for.
    def planned(study: Study, cells: object, out: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    lab.watch.planned = planned
    finished = lab.run(lab.study({"a": "true", "b": "true"}))
    assert (finished.measured, finished.stopped) == (0, "stopped as asked, with no cell running")
    assert lab.ran() == [] and lab.records() == []


class Full(Disk):
    """A disk that has room for so many writes."""

    def __init__(self, writes: int) -> None:
        self.left = writes

    def write(self, descriptor, content):
        self.left -= 1
        if self.left < 0:
            raise OSError(28, os.strerror(28))
        return super().write(descriptor, content)


@pytest.mark.parametrize("writes", range(6))
def test_a_disk_that_is_full_is_said_in_one_sentence_and_what_was_written_is_whole(lab, writes):
    study = lab.study({"a": "true", "b": "true"})
    with pytest.raises(MachineError, match=r"cannot write .*: no space left on device; free space"):
        lab.run(study, Edges(disk=Full(writes)))
    assert not list(lab.out.rglob(".aside-*"))
    stored = len(lab.records())
    assert stored == max(0, writes - 2)
    assert lab.run(study).measured == 4 - stored


def test_a_folder_of_cells_that_cannot_be_written_is_no_bug_of_ours(lab):
    lab.out.mkdir()
    study = lab.study({"a": "true"}, repetitions={"min": 1})
    lab.run(study)
    (lab.out / "cells" / lab.records()[0].cell.id / "r1").write_text("in the way")
    with pytest.raises(MachineError, match=r"cannot write .*r1.*; free space there or choose another --out"):
        lab.run(lab.study({"a": "true"}, repetitions={"min": 2}))


def test_a_hypothesis_that_came_after_data_is_post_hoc_for_good(lab):
    from coresident.lab.run.campaign import read_plan

    arms = {"a": lab.metric(10), "b": lab.metric(5)}
    lab.run(lab.study(arms, repetitions={"min": 3}))
    claim = {"expect": {"ratio": {"at_least": 1.0}}}
    study = lab.study(arms, claim, repetitions={"min": 3})
    lab.run(study)
    plan = read_plan(lab.out)
    assert plan is not None and plan.post_hoc == {"H"}
    assert lab.judge(study).state is State.SUPPORTED
