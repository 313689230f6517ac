"""What is compared is measured together, in an order that drift cannot use."""

from __future__ import annotations

import pytest

from coresident.lab.study.blocks import Group, groups, order
from coresident.lab.study.cells import expand

SLOPE = "hypotheses.H1.compare={arm: fork, to: native, slope: learners}"


@pytest.fixture
def grouped(read, workload):
    def grouped(*overrides: str) -> list[Group]:
        loaded = read(overrides=overrides)
        return groups(loaded.study, expand(loaded.study, workload))

    return grouped


def points(group: Group) -> set[tuple[object, ...]]:
    return {(cell.arm, *cell.factors.values()) for cell in group.cells}


def test_cells_with_the_same_levels_form_a_group(grouped):
    two, four = grouped()
    assert points(two) == {("native", 2), ("fork", 2)}
    assert points(four) == {("native", 4), ("fork", 4)}
    assert two.id.startswith("learners-2-") and four.id.startswith("learners-4-")


def test_a_slope_joins_the_levels_it_runs_through(grouped):
    [one] = grouped(SLOPE)
    assert len(one.cells) == 4


def test_a_slope_joins_only_where_it_is_stated(grouped):
    at_one = "hypotheses.H1.compare={arm: fork, slope: learners, at: {steps: 1}, to: native}"
    found = grouped("factors.steps=[1, 2]", at_one)
    assert sorted(len(group.cells) for group in found) == [2, 2, 4]


def test_without_factors_all_arms_are_one_group(read, workload):
    loaded = read(
        ("factors:\n  learners: [2, 4]                             # line 11\n", ""),
        (", at: {learners: 2}", ""),
    )
    [one] = groups(loaded.study, expand(loaded.study, workload))
    assert one.id == "all" and len(one.cells) == 2


def test_ids_tell_groups_apart_and_do_not_depend_on_arms(grouped):
    names = [group.id for group in grouped("factors.name=['a/b', 'a b']")]
    assert len(set(names)) == 4
    assert [group.id for group in grouped()] == [group.id for group in grouped("arms.third={}")]


def test_every_block_measures_every_cell_once(grouped):
    [group] = grouped(SLOPE)
    for repetition in range(6):
        assert {cell.id for cell in order(group, repetition, seed=0)} == {cell.id for cell in group.cells}


def test_arms_alternate_from_block_to_block(grouped):
    [group, _] = grouped()
    firsts = [order(group, repetition, seed=0)[0].arm for repetition in range(6)]
    assert firsts[::2] == [firsts[0]] * 3 and firsts[1::2] == [firsts[1]] * 3 and firsts[0] != firsts[1]


def test_the_seed_decides_which_arm_starts(grouped):
    [group, _] = grouped()
    assert {order(group, 0, seed)[0].arm for seed in range(20)} == {"native", "fork"}
    assert order(group, 3, seed=5) == order(group, 3, seed=5)


def test_a_linear_drift_cancels_over_two_blocks(grouped):
    [group] = grouped(SLOPE, "arms.third={sharing: fork, steps: 3}", "factors.learners=[1,2,4,8]")
    for couple in range(3):
        there, back = order(group, 2 * couple, seed=1), order(group, 2 * couple + 1, seed=1)
        assert {there.index(cell) + back.index(cell) for cell in group.cells} == {len(group.cells) - 1}


def test_factor_points_are_shuffled_anew(grouped):
    [group] = grouped(SLOPE, "factors.learners=[1,2,4,8]")
    sequences = {tuple(cell.factors["learners"] for cell in order(group, 2 * n, seed=0)) for n in range(6)}
    assert len(sequences) > 2
