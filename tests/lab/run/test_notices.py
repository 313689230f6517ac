"""What is said before a run: claims that no number of its blocks can decide, controls left to the program, late claims."""

from __future__ import annotations

import pytest

from coresident.lab.run.notices import going_on, notices, unanswered, undecidable
from coresident.lab.study.plan import reconcile
from coresident.workload import workload

RATIO = {"metric": "wall_seconds", "compare": {"arm": "a", "to": "b"}, "expect": {"ratio": {"at_most": 1.0}}}
SAME = {"metric": None, "compare": {"arm": "a", "to": "b"}, "expect": {"same": True}}


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"min": 2}, ["2 blocks can never decide H: an interval needs 3 (set repetitions.min to 3 or more)"]),
        ({"min": 1, "max": 9, "until": {"half_width": 0.1}}, []),
        ({"min": 3}, []),
    ],
)
def test_too_few_blocks_for_an_interval_are_told(lab, limits, expected):
    assert undecidable(lab.study({"a": "true", "b": "true"}, RATIO, repetitions=limits).study) == expected


def test_one_difference_refutes_sameness_so_one_block_can_decide_it(lab):
    assert undecidable(lab.study({"a": "true", "b": "true"}, SAME, repetitions={"min": 1}).study) == []


def test_going_on_after_the_least_number_of_blocks_says_why(lab):
    limits = {"min": 4, "max": 8, "until": {"half_width": 0.4}}
    said = going_on(lab.study({"a": "true", "b": "true"}, RATIO, repetitions=limits).study, ["H (n=2)", "I"])
    assert said.startswith("going on after 4 blocks, to 8 at most: the interval of H (n=2) (and 1 more) is")
    assert "wider than the half_width of 0.4" in said


LEFT = "is not checked by the lab, and unverified unless the program reports it"


@pytest.mark.parametrize(
    ("control", "meant"),
    [
        ("exclusive", " (did you mean 'exclusive-device'?)"),
        ("pinned-cpus-all", " (did you mean 'pinned-cpus'?)"),
        ("fan-speed", ""),
    ],
)
def test_a_control_that_is_left_to_the_program_is_told(lab, control, meant):
    loaded = lab.study(
        {"a": "true", "b": "true"}, RATIO, controls=["finite", control], repetitions={"min": 3}
    )
    command = workload("command")
    told = [f"control {control!r} {LEFT}{meant}"]
    assert unanswered(loaded.study, command) == told
    assert (
        notices(loaded.study, command, None, reconcile(None, loaded.study, command, has_data=False)) == told
    )


def test_controls_that_the_lab_checks_are_not_worth_a_word(lab):
    loaded = lab.study({"a": "true"}, controls=["exclusive-device", "pinned-cpus", "finite"])
    assert unanswered(loaded.study, workload("command")) == []
