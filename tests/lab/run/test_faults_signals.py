"""A run that is asked to stop, as a real process with real signals; and what ends with it."""

from __future__ import annotations

import os
import pty
import signal

import pytest

WAITING = 'touch "$PWD/running"; until test -e "$PWD/go"; do sleep 0.02; done\n'


def running(lab):
    """The study's process, once its first cell runs."""
    study = lab.study({"a": WAITING, "b": WAITING}, grace=1.0)
    process = lab.start(study)
    lab.wait((lab.place / "running").exists)
    return study, process


def finish(lab, study):
    """The same command again, to the end: how many cells it measured."""
    (lab.place / "go").touch()
    before = len(lab.records())
    assert lab.ends(lab.start(study))[0] == 0
    return len(lab.records()) - before


def test_ctrl_c_once_lets_the_running_cell_finish_and_starts_no_other(lab):
    study, process = running(lab)
    # As a terminal does it: to the whole group. The cell is in a session of its own and hears nothing of it.
    os.killpg(process.pid, signal.SIGINT)
    lab.hears(process, "stopping after the cell that is running")
    assert lab.alive() and process.poll() is None
    (lab.place / "go").touch()
    status, said = lab.ends(process)
    assert status == 3 and "stopped as asked, after the cell that was running" in said
    assert [record.status for record in lab.records()] == ["ok"]
    assert finish(lab, study) == 3
    assert set(lab.times().values()) == {1}


@pytest.mark.parametrize("signals", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM,), (signal.SIGHUP,)])
def test_ctrl_c_twice_or_sigterm_ends_the_running_cell_and_says_so_in_its_record(lab, signals):
    study, process = running(lab)
    for number in signals:
        os.killpg(process.pid, number)
        lab.hears(process, "stopping")
    status, said = lab.ends(process)
    assert status == 3 and "repeat the command to go on" in said
    assert lab.alive() == []
    (record,) = lab.records()
    assert record.status == "interrupted" and not list(lab.out.rglob(".aside-*"))
    # It cost no attempt and no generation: the same block goes on.
    assert finish(lab, study) == 4
    assert [r.status for r in lab.records()] == ["interrupted", "ok", "ok", "ok", "ok"]
    assert {r.block.generation for r in lab.records()} == {0}
    assert lab.times()[record.cell.arm, 0] == 2 and sum(lab.times().values()) == 5


def test_a_terminal_that_is_gone_takes_no_record_with_it(lab):
    # Closing a terminal sends SIGHUP, and whatever is written to it from then on is an error.
    ours, theirs = pty.openpty()
    process = lab.start(lab.study({"a": WAITING}, grace=1.0), output=theirs)
    os.close(theirs)
    lab.wait((lab.place / "running").exists)
    os.close(ours)
    os.killpg(process.pid, signal.SIGHUP)
    process.wait(timeout=30)
    assert lab.alive() == []
    assert [record.status for record in lab.records()] == ["interrupted"]


def test_an_interrupted_cell_never_enters_an_aggregate(lab):
    from coresident.lab.records import query

    _, process = running(lab)
    process.terminate()
    lab.ends(process)
    assert len(query.records(lab.out)) > 0, "it is shown"
    assert len(query.aggregate(lab.out)) == 0


def test_a_timeout_ends_even_a_grandchild_in_its_own_session_that_ignores_sigterm(lab):
    stubborn = """
        setsid sh -c 'trap "" TERM INT HUP; while :; do sleep 0.05; done' &
        sleep 60
    """
    lab.run(lab.study({"a": stubborn, "b": "true"}, timeout=0.5, grace=0.3, repetitions={"min": 1}))
    assert lab.alive() == []
    (record,) = lab.records("a")
    assert record.status == "timeout" and "longer than its timeout" in record.reason
    assert 0.7 <= record.duration < 30, "the grace was given, and no more than that"
    assert lab.times() == {("a", 0): 1, ("b", 0): 1}, "a timeout is an outcome, and is not repeated"


def test_what_a_cell_leaves_running_is_ended_before_the_next_one_starts(lab):
    leaving = 'setsid sleep 60 > /dev/null 2>&1 &\necho $! >> "$PWD/left"\n'
    looking = 'for pid in $(cat "$PWD/left"); do kill -0 $pid && touch "$PWD/seen"; done; true\n'
    (lab.place / "left").touch()
    lab.run(lab.study({"a": leaving, "b": looking}))
    assert len((lab.place / "left").read_text().split()) == 2
    assert not (lab.place / "seen").exists() and lab.alive() == []
    assert {record.status for record in lab.records()} == {"ok"}
    assert all("still running when it ended: 1" in record.reason for record in lab.records("a"))
