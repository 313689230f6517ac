"""What an attempt amounts to: an end that is not a clean one is never `ok`, and the reason says which."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from coresident.lab.records.schema import MetricValue
from coresident.lab.run.process.supervise import Outcome
from coresident.lab.run.reported.events import Observed
from coresident.lab.run.status import conclude

CLEAN = Outcome(exit_code=0, wall=2.0, started=100.0, ended=102.0, oom_kills=0)


def said(**values: Any) -> Observed:
    return Observed(**{"done": True, **values})


def test_a_clean_end_with_done_is_ok() -> None:
    assert conclude(CLEAN, said()) == ("ok", "")


def test_exit_code_zero_without_done_has_failed() -> None:
    status, reason = conclude(CLEAN, Observed())
    assert status == "failed" and "without reporting that all is done" in reason


def test_a_command_is_done_by_its_exit_code() -> None:
    assert conclude(CLEAN, Observed(), by_exit=True) == ("ok", "")
    status, reason = conclude(replace(CLEAN, exit_code=3), Observed(), by_exit=True)
    assert (status, reason) == ("failed", "exit code 3")


@pytest.mark.parametrize("by_exit", [True, False])
def test_a_metric_that_a_hypothesis_names_must_have_been_reported(by_exit: bool) -> None:
    status, reason = conclude(CLEAN, said(), {"speed", "size"}, by_exit=by_exit)
    assert status == "failed" and "did not report 'size', 'speed'" in reason
    metrics = {name: MetricValue(value=1.0, unit="") for name in ("speed", "size", "other")}
    assert conclude(CLEAN, said(metrics=metrics), {"speed", "size"}, by_exit=by_exit)[0] == "ok"


@pytest.mark.parametrize(
    ("outcome", "status", "words"),
    [
        (replace(CLEAN, exit_code=1), "failed", "exit code 1 although it reported done"),
        (replace(CLEAN, exit_code=None, signal=signal.SIGSEGV), "failed", "killed by SIGSEGV"),
        (replace(CLEAN, exit_code=None, signal=signal.SIGRTMIN + 3), "failed", "killed by signal 37"),
        (
            replace(CLEAN, exit_code=None, signal=9),
            "failed",
            "perhaps by the kernel for want of memory (its counter",
        ),
        (replace(CLEAN, exit_code=None, signal=9, oom_kills=None), "failed", "no counter can be read"),
        (
            replace(CLEAN, exit_code=None, signal=9, oom_kills=1),
            "oom",
            "killed for want of memory while it ran",
        ),
        (
            replace(CLEAN, exit_code=137, oom_kills=1),
            "oom",
            "killed for want of memory while it ran; exit code 137",
        ),
        (replace(CLEAN, exit_code=None, signal=15, timed_out=True), "timeout", "ended after 2.0 s"),
        (replace(CLEAN, exit_code=0, timed_out=True), "timeout", "longer than its timeout"),
        (replace(CLEAN, exit_code=0, interrupted=True), "interrupted", "asked to stop now"),
        (replace(CLEAN, exit_code=None, lost=True), "failed", "its shim was killed"),
        (
            replace(CLEAN, exit_code=None, problem="'x' cannot be executed"),
            "failed",
            "'x' cannot be executed",
        ),
        (replace(CLEAN, survivors=2), "failed", "2 of its processes could not be killed"),
    ],
)
def test_any_other_end_is_not_ok_although_done_was_reported(
    outcome: Outcome, status: str, words: str
) -> None:
    found, reason = conclude(outcome, said())
    assert found == status and words in reason


def test_a_reported_failure_counts_and_not_the_exit_code_that_follows() -> None:
    failed = said(failed=("oom", "no memory for the base"), failed_at=101.0, done=False)
    assert conclude(replace(CLEAN, exit_code=1), failed) == ("oom", "no memory for the base")


def test_a_failure_that_was_reported_with_done_is_still_a_failure() -> None:
    assert conclude(CLEAN, said(failed=("failed", "one of four learners is gone")))[0] == "failed"


def test_a_failure_reported_before_the_timeout_is_the_cause() -> None:
    outcome = replace(CLEAN, exit_code=None, signal=9, timed_out=True, asked_to_end=150.0)
    before = said(failed=("nonfinite", "loss is nan"), failed_at=120.0)
    assert conclude(outcome, before) == ("nonfinite", "loss is nan")


@pytest.mark.parametrize("at", [150.5, None])
def test_a_failure_that_came_of_being_ended_is_a_timeout(at: float | None) -> None:
    outcome = replace(CLEAN, exit_code=1, timed_out=True, asked_to_end=150.0)
    assert (
        conclude(outcome, said(failed=("failed", "learner 2 was killed by SIGTERM"), failed_at=at))[0]
        == "timeout"
    )


def test_the_kernels_counter_explains_a_failure_that_only_saw_a_killed_learner() -> None:
    status, reason = conclude(
        replace(CLEAN, exit_code=1, oom_kills=1), said(failed=("failed", "learner 2 was killed by SIGKILL"))
    )
    assert status == "oom" and "learner 2 was killed by SIGKILL" in reason


def test_a_value_that_is_not_finite_is_an_outcome_of_its_own() -> None:
    observed = said(nonfinite=["1.jsonl line 3: metric 'loss': value: nan is not a finite number"])
    assert conclude(CLEAN, observed) == ("nonfinite", observed.nonfinite[0])
    assert conclude(replace(CLEAN, exit_code=1), observed)[0] == "nonfinite"


def test_a_fault_in_what_was_reported_has_failed() -> None:
    assert conclude(CLEAN, said(faults=["a", "b", "c"])) == ("failed", "a (and 2 more)")


@pytest.mark.parametrize("by_exit", [True, False])
def test_a_torn_line_matters_only_where_the_cell_claims_to_be_complete(by_exit: bool) -> None:
    torn = said(torn=["1.jsonl line 9 is cut short"])
    assert conclude(CLEAN, torn, by_exit=by_exit) == ("failed", "1.jsonl line 9 is cut short")
    killed = replace(CLEAN, exit_code=None, signal=9, timed_out=True)
    assert conclude(killed, torn, by_exit=by_exit)[0] == "timeout"


def test_a_failed_control_invalidates_what_would_be_ok_and_nothing_else() -> None:
    failed = {"pinned-cpus": "asked [0], ran [0, 1]"}
    assert conclude(CLEAN, said(), failed_controls=failed) == (
        "invalid",
        "pinned-cpus: asked [0], ran [0, 1]",
    )
    assert conclude(replace(CLEAN, exit_code=1), said(), failed_controls=failed)[0] == "failed"
    assert conclude(CLEAN, said(), failed_controls={}) == ("ok", "")


def test_what_was_left_running_is_remarked() -> None:
    assert conclude(replace(CLEAN, leftovers=3), said()) == (
        "ok",
        "processes still running when it ended: 3; they were ended",
    )
