"""A card that is not clean before, is left dirty after, or cannot be read: nothing is measured that cannot be trusted.

The card is a stand-in; the lab, its cells and their processes are real.
"""

from __future__ import annotations

import pytest

from coresident.errors import MachineError
from coresident.lab.run.edges import Edges
from coresident.lab.run.machine.nvml import MIB, Unreadable
from coresident.lab.verdict.model import State

CLAIM = {"expect": {"ratio": {"at_least": 1.0}}}


@pytest.fixture
def study(lab):
    arms = {"a": lab.metric(10), "b": 'touch "$PWD/used"\n' + lab.metric(5)}
    return lab.study(arms, CLAIM, controls=["exclusive-device"])


def edges(card):
    return Edges(nvml=card, patience=0.1)


def used_after_b(lab, card, after):
    """The card's memory is what `after` says as soon as arm b has run."""

    def memory(uuid):
        if not (lab.place / "used").exists():
            return 3 * MIB
        if after is None:
            raise Unreadable("GPU is lost")
        return after * MIB

    card.memory_used = memory


def test_a_clean_card_is_measured_on_and_every_cell_sees_that_card_alone(lab, card, cuda):
    seen = 'test "$CUDA_VISIBLE_DEVICES" = ' + cuda.uuid + "\n"
    finished = lab.run(lab.study({"a": seen}, controls=["exclusive-device"]), edges(card), cuda)
    assert (finished.measured, finished.stopped) == (2, "")
    for record in lab.records():
        assert record.status == "ok" and record.telemetry["device_idle_mib"] == 3.0
        assert record.conditions.values["device.driver"] == "1.2.3"
        control = record.controls["exclusive-device"]
        assert (control.state, control.ran["clean_after"]) == ("unverified", True)


def test_a_card_in_use_is_refused_before_anything_runs_and_its_holder_is_named(lab, card, cuda, study):
    card.used, card.holding = [1900.0], [1]
    with pytest.raises(
        MachineError, match=r"1900 MiB are in use on device GPU-.* \(limit: 500 MiB\), held by pid 1 "
    ):
        lab.run(study, edges(card), cuda)
    assert lab.ran() == [] and lab.records() == []
    # Once it is free the same command goes on.
    card.used, card.holding = [3.0], None
    assert lab.run(study, edges(card), cuda).measured == 4


def test_a_card_whose_memory_cannot_be_read_is_refused(lab, card, cuda, study):
    card.used = [None]
    with pytest.raises(
        MachineError, match=r"memory of device GPU-.* cannot be read, so nothing says that it is free"
    ):
        lab.run(study, edges(card), cuda)
    assert lab.ran() == [] and lab.records() == []


def test_memory_that_comes_back_a_moment_later_is_waited_for(lab, card, cuda, study):
    card.used = [1900.0, 1900.0, 3.0]
    assert lab.run(study, Edges(nvml=card, patience=5.0), cuda).measured == 4


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (4000, "4000 MiB are still in use on device"),
        (None, "cannot be read after the cell (before: 3 MiB in use)"),
    ],
)
def test_a_card_that_is_left_dirty_marks_the_record_and_ends_the_run(lab, card, cuda, study, after, said):
    used_after_b(lab, card, after)
    finished = lab.run(study, edges(card), cuda)
    assert said in finished.stopped
    (last,) = lab.records("b")
    assert last.status == "invalid" and said in last.controls["exclusive-device"].reason
    assert lab.ran()[-1] == ("b", 0), "nothing is measured on it after that"
    assert lab.judge(study).state is State.INVALID
    with pytest.raises(MachineError, match=r"in use on device|cannot be read"):
        lab.run(study, edges(card), cuda)
    assert lab.ran()[-1] == ("b", 0)


def test_a_card_that_is_left_dirty_marks_the_record_of_a_study_without_controls_too(lab, card, cuda):
    used_after_b(lab, card, 4000)
    lab.run(lab.study({"b": 'touch "$PWD/used"'}), edges(card), cuda)
    assert [record.status for record in lab.records()] == ["invalid"]


def test_a_card_that_goes_blind_during_a_cell_gives_no_peak_of_memory(lab, card, cuda):
    def memory(uuid):
        if (lab.place / "blind").exists() and not (lab.place / "sees").exists():
            raise Unreadable("Not Supported")
        return 3 * MIB

    card.memory_used = memory
    script = 'touch "$PWD/blind"; sleep 0.3; touch "$PWD/sees"\n'
    lab.run(lab.study({"a": script}, repetitions={"min": 1}), edges(card), cuda)
    (record,) = lab.records()
    assert "peak_device_memory_mib" not in record.metrics
    assert "could not be read" in record.telemetry["peak_device_memory_reason"]
