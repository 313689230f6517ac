"""The wall clock is set while cells run: no duration changes, and every record says what happened."""

from __future__ import annotations

import datetime
import time

import pytest

from coresident.lab.run.edges import Edges


def stepping(seconds):
    """A wall clock that is set by `seconds` at every second look: between a cell's start and its end."""
    looks = iter(range(1000))
    return lambda: time.time() + seconds * ((next(looks) + 1) // 2)


@pytest.mark.parametrize("hours", [-1, 1])
def test_durations_are_untouched_when_the_wall_clock_is_set_and_the_step_is_recorded(lab, hours):
    study = lab.study({"a": "sleep 0.2"}, repetitions={"min": 3})
    began = time.monotonic()
    lab.run(study, Edges(wall=stepping(3600 * hours)))
    took = time.monotonic() - began
    records = lab.records()
    assert [record.status for record in records] == ["ok"] * 3
    for record in records:
        assert 0.2 <= record.metrics["wall_seconds"].value <= record.duration <= took
        assert record.clock_step == pytest.approx(3600 * hours, abs=1)
    # Their order is kept by repetition and attempt, whatever the clock said.
    assert sorted(record.block.repetition for record in records) == [0, 1, 2]
    assert lab.run(study).measured == 0


def test_a_clock_that_goes_back_does_not_lengthen_or_end_a_budget(lab):
    study = lab.study({"a": "true"}, repetitions={"min": 3})
    finished = lab.run(study, Edges(wall=stepping(86400)), budget_minutes=1)
    assert (finished.measured, finished.stopped) == (3, "")


def test_a_clock_that_runs_as_it_should_is_no_step(lab):
    lab.run(lab.study({"a": "sleep 0.1"}, repetitions={"min": 1}))
    (record,) = lab.records()
    assert record.clock_step == 0.0
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(record.started)
    assert 0.1 <= age.total_seconds() < 60
