"""What fools a comparison, measured by a whole lab: drift under a fixed order, modes, a single sample."""

from __future__ import annotations

import pytest

from coresident.lab.run import campaign
from coresident.lab.verdict.model import State

# How many cells have been run: the machine's slow state, which no arm has a say in.
TURN = 'turn=$(wc -l < "$RAN")\n'


def drifting(lab, at_turn_0):
    """A cell whose time grows by 5 % of 100 a turn, whichever arm it is."""
    return TURN + f"took=$(({at_turn_0} + 5 * turn))\n" + lab.metric('"$took"', "took", "s")


CLAIM = {"metric": "took", "expect": {"ratio": {"at_most": 1.0}}}


def test_a_drift_flips_no_comparison_because_the_order_alternates(lab, monkeypatch):
    # Arm a takes 1 % less. Behind b in every block, it would take some 4 % more, in each block alike.
    arms = {"a": drifting(lab, 99), "b": drifting(lab, 100)}
    study = lab.study(arms, CLAIM, repetitions={"min": 6})

    lab.run(study)
    (finding,) = lab.judge(study).hypotheses[0].findings
    assert finding.state is State.UNDECIDED
    assert finding.estimate is not None and 0.98 < finding.estimate < 1.0, "the drift has cancelled"
    first = [arm for arm, _ in lab.ran()][::2]
    assert first == [first[0], "b" if first[0] == "a" else "a"] * 3

    # The same lab with a fixed order is fooled, so that it is the order that helps.
    monkeypatch.setattr(
        campaign, "order", lambda group, *_: sorted(group.cells, key=lambda cell: cell.arm, reverse=True)
    )
    lab.out = lab.place / "fixed"
    (lab.place / "ran").unlink()
    lab.run(study)
    (fooled,) = lab.judge(study).hypotheses[0].findings
    assert fooled.state is State.REFUTED


@pytest.mark.parametrize("blocks", [1, 2])
def test_one_or_two_samples_are_undecided_and_never_an_interval_of_zero_width(lab, blocks):
    study = lab.study({"a": lab.metric(10), "b": lab.metric(5)}, {"expect": {"ratio": {"at_least": 1.5}}},
                      repetitions={"min": blocks})  # fmt: skip
    lab.run(study)
    (finding,) = lab.judge(study).hypotheses[0].findings
    assert finding.state is State.UNDECIDED and finding.pairs == blocks
    assert (finding.estimate, finding.low, finding.high) == (None, None, None)


def test_equal_samples_still_have_the_noise_floor_around_them(lab):
    study = lab.study({"a": lab.metric(10), "b": lab.metric(5)}, {"expect": {"ratio": {"at_least": 1.5}}},
                      repetitions={"min": 3})  # fmt: skip
    lab.run(study)
    (finding,) = lab.judge(study).hypotheses[0].findings
    assert finding.state is State.SUPPORTED
    assert finding.low < finding.estimate < finding.high


def test_two_modes_do_not_pass_for_the_one_that_is_met_more_often(lab):
    # Arm a takes 15 s or 156 s, the long one in two blocks of six; b always 20 s. Its median says: faster.
    modes = TURN + "test $((turn % 5)) = 0 && took=156 || took=15\n" + lab.metric('"$took"', "took", "s")
    arms = {"a": modes, "b": lab.metric(20, "took", "s")}
    study = lab.study(arms, CLAIM, repetitions={"min": 6})
    lab.run(study)
    values = sorted(record.metrics["took"].value for record in lab.records("a"))
    assert values[0] == 15 and values[-1] == 156 and sum(values[2:4]) / 2 == 15
    (finding,) = lab.judge(study).hypotheses[0].findings
    assert finding.state is State.UNDECIDED
    assert finding.low < 1.0 < finding.high
