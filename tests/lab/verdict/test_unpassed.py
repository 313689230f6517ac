"""Controls that did not pass: counted over the records that answer them, with the reason that is most frequent."""

from __future__ import annotations

from typing import Any

from coresident.lab.records.schema import Control
from coresident.lab.verdict import unpassed
from coresident.lab.verdict.model import Unpassed


def control(state: Any, reason: str = "") -> Control:
    return Control(asked="on", ran="off", state=state, reason=reason)


def test_reasons_that_differ_in_numbers_are_one_and_the_most_frequent_is_told(lab: Any) -> None:
    run = lab({})
    busy = [f"others used {seconds} CPU seconds" for seconds in ("0.20", "1.5", "3")]
    for repetition, reason in enumerate(["could not be read", *busy]):
        answered = {"exclusive-device": control("unverified", reason), "finite": control("passed")}
        run.add("native", repetition, controls=answered)
    run.add("native", 4, controls={"exclusive-device": control("passed"), "finite": control("failed")})
    run.add("native", 5)
    assert unpassed.of(run.records) == (
        Unpassed("exclusive-device", "unverified", 4, 5, busy[0]),
        Unpassed("finite", "failed", 1, 5, "asked on, ran off"),
    )


def test_where_all_passed_there_is_nothing_to_say(lab: Any) -> None:
    run = lab({})
    run.add("native", 0, controls={"finite": control("passed")})
    assert unpassed.of(run.records) == ()


def test_what_an_interrupted_attempt_left_unchecked_is_not_told(lab: Any) -> None:
    run = lab({})
    nothing = {"finite": control("unverified", "the cell reported no numbers")}
    run.add("native", 0, status="interrupted", controls=nothing)
    run.add("native", 0, controls={"finite": control("passed")})
    assert unpassed.of(run.records) == ()
    run.add("native", 1, status="timeout", controls=nothing)
    assert unpassed.of(run.records) == (
        Unpassed("finite", "unverified", 1, 2, "the cell reported no numbers"),
    )


def test_what_a_control_found_is_told_in_words_where_there_is_no_reason(lab: Any) -> None:
    run = lab({})
    found = Control(asked=True, ran=[{"mib": 1.5}, {"mib": 1.5}], state="failed")
    run.add("native", 0, controls={"shared": found})
    assert [one.reason for one in unpassed.of(run.records)] == ["asked true, ran 2 x (mib 1.5)"]
