"""Judging records: which of them count, the five states, what they cannot decide, and why."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from coresident.errors import UserError
from coresident.lab.verdict import model
from coresident.lab.verdict.model import State, exit_status

GOOD = [0.990, 1.000, 1.010]
WITHIN_2 = {
    "claim": "c",
    "metric": "speed",
    "compare": {"arm": "fork"},
    "expect": {"value": {"within": [90, 110]}},
}


# Ratios


def test_all_of_the_interval_above_the_limit_supports(lab: Any, ratio: Any) -> None:
    judged = lab({"H1": ratio}).pairs(GOOD).judged()
    (finding,) = judged.findings
    assert judged.state is State.SUPPORTED
    assert finding.estimate == pytest.approx(1.0, abs=1e-4)
    assert finding.low < 0.99 and finding.high > 1.01
    assert (finding.pairs, finding.needed) == (3, 3)
    assert "at least 0.95" in judged.why


def test_all_of_it_below_refutes_and_a_part_decides_nothing(lab: Any, ratio: Any) -> None:
    assert lab({"H1": ratio}).pairs([0.80, 0.81, 0.80]).judged().state is State.REFUTED
    assert lab({"H1": ratio}).pairs([0.94, 0.95, 0.96]).judged().state is State.UNDECIDED


def test_pairs_are_of_one_block_so_that_a_slow_block_slows_both(lab: Any, ratio: Any) -> None:
    run = lab({"H1": ratio})
    for repetition, base in enumerate((10.0, 500.0, 90.0)):
        run.add("native", repetition, {"speed": base})
        run.add("fork", repetition, {"speed": base * 0.99})
    assert run.judged().state is State.SUPPORTED


@pytest.mark.parametrize("pairs", [1, 2])
def test_fewer_than_three_pairs_are_undecided_and_say_how_many_there_are(
    lab: Any, ratio: Any, pairs: int
) -> None:
    judged = lab({"H1": ratio}).pairs([1.0] * pairs).judged()
    assert judged.state is State.UNDECIDED
    assert judged.findings[0].low is None
    assert f"{pairs} pair{'s' if pairs > 1 else ''} of the 3 needed" in judged.why


def test_a_difference_is_paired_by_block_and_in_the_metrics_unit(lab: Any, ratio: Any) -> None:
    claim = ratio | {"expect": {"difference": {"at_most": -90}}}
    run = lab({"H1": claim})
    # The blocks lie far apart; within each, fork is 100 below native, give or take 1.
    for repetition, (base, gap) in enumerate([(1000.0, 99.0), (5000.0, 100.0), (200.0, 101.0)]):
        run.add("native", repetition, {"speed": base})
        run.add("fork", repetition, {"speed": base - gap})
    (finding,) = run.judged().findings
    assert finding.state is State.SUPPORTED
    assert finding.estimate == pytest.approx(-100.0)
    assert finding.unit
    refuted = lab({"H1": ratio | {"expect": {"difference": {"at_most": -110}}}})
    for repetition in range(3):
        refuted.add("native", repetition, {"speed": 1000.0 + repetition})
        refuted.add("fork", repetition, {"speed": 900.0 + repetition})
    assert refuted.judged().state is State.REFUTED


def test_equal_pairs_are_as_wide_as_the_studys_noise_floor(lab: Any, ratio: Any) -> None:
    run = lab({"H1": ratio}, settings={"noise_floor": 0.06}).pairs([1.0] * 3)
    (finding,) = run.judged().findings
    assert (finding.low, finding.high) == pytest.approx((1 / 1.06, 1.06))
    assert finding.state is State.UNDECIDED


def test_a_metric_that_is_not_positive_has_no_ratio_and_says_so(lab: Any, ratio: Any) -> None:
    judged = lab({"H1": ratio}).pairs([1.0, 0.0, 1.0]).judged()
    assert judged.state is State.UNDECIDED
    assert "speed is not positive in every block" in judged.why


def test_records_of_two_units_are_not_compared(lab: Any, ratio: Any) -> None:
    run = lab({"H1": ratio})
    for repetition in range(3):
        run.add("native", repetition, {"speed": 1.0}, unit="1/s")
        run.add("fork", repetition, {"speed": 1000.0}, unit="1/ms")
    assert run.judged().state is State.UNDECIDED
    assert "1/ms and in 1/s" in run.judged().why


def test_records_without_the_metric_do_not_count(lab: Any, ratio: Any) -> None:
    run = lab({"H1": ratio}).pairs([1.0, 1.0])
    run.add("native", 2, {"other": 1.0})
    run.add("fork", 2, {"speed": 100.0})
    assert run.judged().state is State.UNDECIDED
    assert "2 pairs of the 3 needed (1 lack speed)" in run.judged().why


def test_outcomes_without_a_number_are_named_where_pairs_are_few(lab: Any, ratio: Any) -> None:
    run = lab({"H1": ratio}).pairs([1.0])
    for repetition in (1, 2):
        run.add("native", repetition, {"speed": 100.0})
        run.add("fork", repetition, status="oom")
    assert run.judged().state is State.UNDECIDED
    assert "1 pair of the 3 needed (fork: 2 oom)" in run.judged().why


def test_pairs_never_cross_generations(lab: Any, ratio: Any) -> None:
    run = lab({"H1": ratio}).pairs(GOOD[:2])
    run.add("native", 2, {"speed": 100.0}, generation=0)
    run.add("fork", 2, status="failed", generation=0)
    run.add("fork", 2, {"speed": 100.0}, generation=1)
    assert run.judged().findings[0].pairs == 2


# States


def test_nothing_measured_is_pending_and_so_is_half_a_comparison(lab: Any, ratio: Any) -> None:
    run = lab({"H1": ratio})
    assert run.judged().state is State.PENDING
    for repetition in range(3):
        run.add("native", repetition, {"speed": 100.0})
    judged = run.judged()
    assert judged.state is State.PENDING
    assert "not measured yet: fork" in judged.why and "native" not in judged.why


def test_an_interrupted_cell_has_not_been_measured(lab: Any, ratio: Any) -> None:
    run = lab({"H1": ratio})
    run.add("native", 0, {"speed": 100.0})
    run.add("fork", 0, status="interrupted")
    assert run.judged().state is State.PENDING


def test_a_failed_control_makes_a_comparison_invalid_and_is_named(lab: Any, ratio: Any) -> None:
    run = lab({"H1": ratio})
    for repetition in range(3):
        run.add("native", repetition, {"speed": 100.0})
        run.add("fork", repetition, {"speed": 100.0}, status="invalid", failed_control="sharing-engaged")
    judged = run.judged()
    assert judged.state is State.INVALID
    assert "control 'sharing-engaged' of fork failed (measured off) in blocks 1, 2, 3" in judged.why


def test_a_control_that_failed_and_then_passed_is_no_obstacle(lab: Any, ratio: Any) -> None:
    run = lab({"H1": ratio}).pairs(GOOD[:2])
    run.add("native", 2, {"speed": 100.0}, generation=0)
    run.add("fork", 2, {"speed": 1.0}, status="invalid", failed_control="finite", generation=0)
    run.add("native", 2, {"speed": 100.0}, generation=1)
    run.add("fork", 2, {"speed": 100.0}, generation=1)
    judged = run.judged()
    assert judged.state is State.SUPPORTED
    assert "finite" not in judged.why


def test_a_decision_tells_which_block_a_failed_control_left_out(lab: Any, ratio: Any) -> None:
    run = lab({"H1": ratio}).pairs(GOOD)
    run.add("native", 3, {"speed": 100.0})
    run.add("fork", 3, {"speed": 1.0}, status="invalid", failed_control="finite")
    judged = run.judged()
    assert judged.state is State.SUPPORTED
    assert "left out: control 'finite' of fork failed (measured off) in block 4" in judged.why


def test_a_claim_about_no_cell_is_pending_never_supported(lab: Any, ratio: Any) -> None:
    ratio["compare"]["at"] = {"learners": 8}
    judged = lab({"H1": ratio}, factors={"learners": [2, 4]}).judged()
    assert judged.state is State.PENDING
    assert judged.why == "no cell of the study matches it"


# Several points


def fill(run: Any, ratios: dict[int, float | str | None]) -> Any:
    for learners, found in ratios.items():
        for repetition in range(3):
            if found is None:
                continue
            at = {"learners": learners}
            run.add("native", repetition, {"speed": 100.0}, at=at)
            if found == "invalid":
                run.add("fork", repetition, at=at, status="invalid", failed_control="finite")
            elif found == "wild":
                run.add("fork", repetition, {"speed": 80.0 + 20 * repetition}, at=at)
            else:
                run.add("fork", repetition, {"speed": 100.0 * found}, at=at)
    return run


KINDS = {
    State.SUPPORTED: 1.0,
    State.REFUTED: 0.5,
    State.UNDECIDED: "wild",
    State.PENDING: None,
    State.INVALID: "invalid",
}
ORDER = [State.REFUTED, State.INVALID, State.UNDECIDED, State.PENDING, State.SUPPORTED]


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations_with_replacement(ORDER, 2)))
def test_over_levels_a_counterexample_goes_first_and_support_needs_all(
    lab: Any, ratio: Any, one: State, other: State
) -> None:
    run = fill(lab({"H1": ratio}, factors={"learners": [2, 4]}), {2: KINDS[other], 4: KINDS[one]})
    judged = run.judged()
    assert [finding.state for finding in judged.findings] == [other, one]
    assert judged.state is one
    if one is not other:
        assert judged.why.startswith("at 1 of 2 points; learners=4: ")
    else:
        assert judged.why.startswith("at each of 2 points; learners=2: ")


def test_at_narrows_a_claim_to_its_level(lab: Any, ratio: Any) -> None:
    ratio["compare"]["at"] = {"learners": 4}
    run = fill(lab({"H1": ratio}, factors={"learners": [2, 4]}), {2: 0.5, 4: 1.0})
    assert run.judged().state is State.SUPPORTED
    assert [dict(finding.at) for finding in run.judged().findings] == [{"learners": 4}]


# Values and slopes


def test_a_value_is_one_arms_mean_in_its_unit(lab: Any) -> None:
    run = lab({"H1": WITHIN_2}).pairs(GOOD)
    (finding,) = run.judged().findings
    assert finding.state is State.SUPPORTED
    assert (finding.estimate, finding.unit) == (pytest.approx(100.0), "1/s")
    # t interval: 6.9646 x 1 / sqrt(3), and the floor of 0.2 %.
    assert finding.high - finding.low == pytest.approx(2 * (4.0210 + 0.2), abs=1e-3)


def slopes(lab: Any, expect: dict[str, Any], to: str | None) -> Any:
    compare = {"arm": "fork", "slope": "learners", **({"to": to} if to else {})}
    claim = {"claim": "c", "metric": "memory", "compare": compare, "expect": expect}
    run = lab({"H1": claim}, factors={"learners": [8, 2, 4]})
    for repetition, base in enumerate((1000.0, 1200.0, 900.0)):
        for learners in (2, 4, 8):
            at = {"learners": learners}
            run.add("native", repetition, {"memory": base + 400.0 * learners}, at=at, unit="MiB")
            run.add("fork", repetition, {"memory": base + 100.0 * learners}, at=at, unit="MiB")
    return run


def test_a_slope_is_fitted_within_each_block_and_judged_as_a_value(lab: Any) -> None:
    (finding,) = slopes(lab, {"value": {"at_most": 110}}, None).judged().findings
    assert finding.state is State.SUPPORTED
    assert (finding.estimate, finding.unit) == (pytest.approx(100.0), "MiB/learners")
    assert finding.at == {}
    # The base differs between blocks by hundreds; within each, the slope is exact.
    assert finding.high - finding.low == pytest.approx(0.4)


def test_a_slope_against_another_arm_is_the_ratio_of_slopes(lab: Any) -> None:
    (finding,) = slopes(lab, {"ratio": {"at_most": 0.3}}, "native").judged().findings
    assert finding.state is State.SUPPORTED
    assert finding.estimate == pytest.approx(0.25)


def test_a_block_that_lacks_a_level_has_no_slope(lab: Any) -> None:
    run = slopes(lab, {"value": {"at_most": 110}}, None)
    run.records = [
        r
        for r in run.records
        if not (r.block.repetition == 1 and r.cell.arm == "fork" and r.cell.factors["learners"] == 4)
    ]
    assert run.judged().findings[0].pairs == 2
    assert run.judged().state is State.UNDECIDED


def test_a_slope_that_is_not_positive_has_no_ratio(lab: Any) -> None:
    run = slopes(lab, {"ratio": {"at_most": 0.3}}, "native")
    for index, record in enumerate(run.records):
        flat = record.metrics["memory"].model_copy(update={"value": 5.0})
        if record.cell.arm == "native":
            run.records[index] = record.model_copy(update={"metrics": {"memory": flat}})
    assert run.judged().state is State.UNDECIDED
    assert "the slope of memory is not positive" in run.judged().why


@pytest.mark.parametrize("levels", [["a", "b"], [True, False], [4]])
def test_a_slope_over_what_are_no_two_numbers_is_refused(lab: Any, levels: list[Any]) -> None:
    claim = {
        "claim": "c",
        "metric": "m",
        "compare": {"arm": "fork", "slope": "f"},
        "expect": {"value": {"at_most": 1}},
    }
    with pytest.raises(UserError, match=r"hypotheses.H1.compare.slope: factor 'f'"):
        lab({"H1": claim}, factors={"f": levels}).verdict()


# Conditions


def test_only_the_newest_conditions_count_and_the_others_are_listed_with_what_changed(
    lab: Any, ratio: Any
) -> None:
    run = lab({"H1": ratio})
    run.pairs([0.5, 0.5, 0.5], conditions={"driver": "550.1", "kernel": "6.1", "old": "x"})
    run.pairs(GOOD, generation=1, conditions={"driver": "560.2", "kernel": "6.1"})
    verdict = run.verdict()
    assert verdict.state is State.SUPPORTED
    assert verdict.hypotheses[0].findings[0].pairs == 3
    (aside,) = verdict.set_aside
    assert aside.differing == (("driver", "550.1", "560.2"), ("old", "x", ""))
    assert len(aside.records) == 6
    assert verdict.conditions == (aside.newest,)


def test_two_drivers_never_make_three_pairs(lab: Any, ratio: Any) -> None:
    run = lab({"H1": ratio})
    for repetition in range(4):
        for arm in ("native", "fork"):
            run.add(arm, repetition, {"speed": 100.0}, conditions={"driver": "1" if repetition < 2 else "2"})
    assert run.judged().state is State.UNDECIDED
    assert run.judged().findings[0].pairs == 2


# The study as a whole


def test_post_hoc_hypotheses_are_marked(lab: Any, ratio: Any) -> None:
    run = lab({"H1": ratio, "H2": ratio}).pairs(GOOD)
    assert [one.post_hoc for one in run.verdict(post_hoc=["H2"]).hypotheses] == [False, True]


@pytest.mark.parametrize(
    ("states", "status"),
    [
        ([State.SUPPORTED], 0),
        ([State.SUPPORTED, State.REFUTED], 1),
        ([State.UNDECIDED, State.SUPPORTED], 3),
        ([State.PENDING, State.SUPPORTED], 3),
        ([State.REFUTED, State.UNDECIDED], 1),
        ([State.REFUTED, State.INVALID, State.SUPPORTED], 4),
    ],
)
def test_exit_status_is_that_of_the_gravest_state(
    lab: Any, ratio: Any, states: list[State], status: int
) -> None:
    claims = {}
    for number in range(len(states)):
        claims[f"H{number}"] = {**ratio, "compare": {**ratio["compare"], "at": {"learners": number}}}
    run = lab(claims, factors={"learners": list(range(len(states)))})
    verdict = fill(run, {number: KINDS[state] for number, state in enumerate(states)}).verdict()
    assert [one.state for one in verdict.hypotheses] == states
    assert verdict.state is model.first_of(states, model.STUDY_PRECEDENCE)
    assert exit_status(verdict) == status


def test_without_hypotheses_the_status_tells_whether_all_is_measured(lab: Any) -> None:
    run = lab({}).pairs([1.0, 1.0])
    assert run.verdict().state is None
    assert exit_status(run.verdict()) == 3
    run.add("native", 2, {"speed": 1.0})
    run.add("fork", 2, status="oom")
    assert exit_status(run.verdict()) == 3
    run.add("fork", 2, {"speed": 1.0}, generation=1)
    assert (run.verdict().measured, run.verdict().planned) == (6, 6)
    assert exit_status(run.verdict()) == 0


# When to stop


def until(width: float) -> dict[str, Any]:
    return {"repetitions": {"min": 3, "max": 9, "until": {"half_width": width}}}


def test_wide_names_the_comparisons_that_are_not_narrow_yet(lab: Any, ratio: Any) -> None:
    run = lab({"H1": ratio}, factors={"learners": [2, 4]}, settings=until(0.02))
    for repetition in range(4):
        for learners, noise in ((2, 0.001), (4, 0.1)):
            at = {"learners": learners}
            run.add("native", repetition, {"speed": 100.0}, at=at)
            run.add("fork", repetition, {"speed": 100.0 * (1 + noise * (-1) ** repetition)}, at=at)
    assert run.wide() == ["H1 (learners=4)"]


def test_wide_asks_for_a_fourth_block(lab: Any, ratio: Any) -> None:
    run = lab({"H1": ratio}, settings=until(0.02)).pairs([1.0] * 3)
    assert run.wide() == ["H1"]
    assert lab({"H1": ratio}, settings=until(0.02)).pairs([1.0] * 4).wide() == []


def test_a_run_that_ended_before_its_intervals_are_narrow_is_unfinished(lab: Any, ratio: Any) -> None:
    noisy = [0.9, 1.1] * 5
    found = {
        blocks: lab({"H1": ratio}, settings=until(0.02)).pairs(noisy[:blocks]).verdict()
        for blocks in (2, 3, 8, 9)
    }
    told = {blocks: (one.wide, one.unfinished) for blocks, one in found.items()}
    assert told == {2: ((), True), 3: (("H1",), True), 8: (("H1",), True), 9: (("H1",), False)}
    narrow = lab({"H1": ratio}, settings=until(0.02)).pairs([1.0] * 4).verdict()
    assert (narrow.wide, narrow.unfinished) == ((), False)
    fixed = lab({"H1": ratio}, settings={"repetitions": {"min": 3}}).pairs(noisy[:4]).verdict()
    assert (fixed.wide, fixed.unfinished) == ((), False)


def test_a_block_that_is_begun_does_not_hide_that_a_run_is_unfinished(lab: Any, ratio: Any) -> None:
    run = lab({"H1": ratio}, settings=until(0.02)).pairs([0.9, 1.1, 0.9])
    run.add("native", 3, {"speed": 100.0})
    assert run.verdict().wide == ("H1",) and run.verdict().unfinished


@pytest.mark.parametrize("limit", [0.1, 0.999, 1.0, 5.0])
def test_wide_does_not_depend_on_what_is_claimed(lab: Any, ratio: Any, limit: float) -> None:
    ratio["expect"]["ratio"] = {"at_least": limit}
    wild = lab({"H1": ratio}, settings=until(0.02)).pairs([0.9, 1.1, 0.9, 1.1])
    calm = lab({"H1": ratio}, settings=until(0.02)).pairs([0.999, 1.001, 0.999, 1.001])
    assert (wild.wide(), calm.wide()) == (["H1"], [])


def test_sameness_and_shares_have_no_width(lab: Any) -> None:
    same = {"claim": "c", "compare": {"arm": "fork", "to": "native"}, "expect": {"same": True}}
    share = {"claim": "c", "compare": {"arm": "fork"}, "expect": {"status": {"is": "ok", "at_least": 0.5}}}
    assert lab({"H1": same, "H2": share}, settings=until(0.02)).wide() == []


def test_a_hypothesis_whose_cells_lost_a_record_is_marked_and_the_others_are_not(lab: Any) -> None:
    claims = {name: {**WITHIN_2, "compare": {"arm": arm}} for name, arm in (("H1", "fork"), ("H2", "native"))}
    run = lab(claims).pairs([1.0] * 4)
    gone = next(record for record in run.records if record.cell.arm == "fork")
    run.retracted = {gone.id: "the fan was off"}
    verdict = run.verdict()
    assert [(one.name, one.after_retraction) for one in verdict.hypotheses] == [("H1", True), ("H2", False)]
    assert [(one.record, one.reason) for one in verdict.retracted] == [(gone.id, "the fan was off")]
    assert verdict.hypotheses[0].findings[0].pairs == 3, "what was retracted decides nothing"
    run.retracted = {}
    assert not any(one.after_retraction for one in run.verdict().hypotheses)


def test_a_block_is_measured_once_every_cell_of_it_has_an_outcome(lab: Any) -> None:
    run = lab({"H1": WITHIN_2}).pairs([1.0])
    run.add("native", 1, {"speed": 1.0})
    run.add("fork", 1, status="failed")
    run.add("native", 2, {"speed": 1.0})
    run.add("fork", 2, status="oom")
    found = run.verdict()
    assert (found.blocks.measured, found.blocks.needed) == (2, 3)
    assert found.statuses == {"ok": 4, "failed": 1, "oom": 1}


@pytest.mark.parametrize(("failed_control", "status"), [("", 3), ("finite", 4)])
def test_a_run_that_was_stopped_has_settled_nothing_unless_it_is_invalid(
    lab: Any, failed_control: str, status: int
) -> None:
    run = lab({"H1": WITHIN_2})
    for repetition in range(3):
        bad = bool(failed_control)
        run.add(
            "fork",
            repetition,
            {"speed": 100.0},
            status="invalid" if bad else "ok",
            failed_control=failed_control,
        )
        run.add("native", repetition, {"speed": 100.0})
    verdict = run.verdict()
    assert model.exit_status(verdict) == (4 if failed_control else 0)
    assert model.exit_status(replace(verdict, stopped="interrupted")) == status


def test_a_run_of_which_something_is_missing_has_settled_nothing(lab: Any) -> None:
    """Claims about an arm hold before another arm is measured; whoever stops there may have chosen to."""
    run = lab({"H1": WITHIN_2})
    for repetition in range(3):
        run.add("fork", repetition, {"speed": 100.0})
        if repetition < 2:
            run.add("native", repetition, {"speed": 100.0})
    verdict = run.verdict()
    assert (verdict.state, verdict.blocks.measured, model.exit_status(verdict)) == (State.SUPPORTED, 2, 3)
    run.add("native", 2, {"speed": 100.0})
    assert model.exit_status(run.verdict()) == 0


def test_a_metric_that_telemetry_withheld_is_missing_for_its_reason(lab: Any) -> None:
    run = lab({"H1": {**WITHIN_2, "metric": "peak_memory_mib"}})
    for repetition in range(3):
        run.add("fork", repetition, {"wall_seconds": 0.01})
        short = {"peak_memory_reason": "the cell was too short"}
        run.records[-1] = run.records[-1].model_copy(update={"telemetry": short})
    assert run.judged().why == ("0 blocks of the 3 needed (3 lack peak_memory_mib: the cell was too short)")
