"""Cells: what is asked, completely, with names and hashes that depend on nothing else."""

from __future__ import annotations

import pytest

from coresident.errors import UserError
from coresident.lab.study.cells import expand

H1_AT = "compare: {arm: fork, to: native, at: {learners: 2}}"


def test_every_arm_meets_every_level_with_complete_parameters(cells):
    found = cells()
    assert [(cell.arm, cell.factors["learners"]) for cell in found] == [
        ("native", 2), ("fork", 2), ("native", 4), ("fork", 4),
    ]  # fmt: skip
    assert found[1].parameters == {
        "sharing": "fork",
        "learners": 2,
        "steps": 20,
        "rate": 0.5,
        "name": "x",
        "targets": ["q", "v"],
        "base": {"config": "tiny", "path": None, "seed": 0},
    }


def test_ids_are_readable_file_names_that_end_in_the_hash(cells):
    cell = cells()[1]
    assert cell.id == f"fork-learners-2-{cell.hash[:8]}"
    [odd, *_] = cells(("[2, 4]", "[2]"), overrides=["factors.name=['a/../b c']"])
    assert odd.id.startswith("native-learners-2-name-a_.._b_c-")


def test_adding_an_arm_or_a_level_leaves_the_other_cells_as_they_are(cells):
    before = {cell.id: cell.hash for cell in cells()}
    after = {
        c.id: c.hash
        for c in cells(overrides=["arms.third={sharing: fork, steps: 5}", "factors.learners=[8,4,2]"])
    }
    assert before.items() <= after.items()
    assert len(after) == 9


@pytest.mark.parametrize(
    "override",
    ["parameters.steps=21", "controls=[finite]", "arms.fork={sharing: none}", "parameters.base.seed=1"],
)
def test_whatever_is_asked_differently_has_another_hash(cells, by_point, override):
    before, after = by_point(cells()), by_point(cells(overrides=[override]))
    assert before["fork", 2].hash != after["fork", 2].hash


@pytest.mark.parametrize(
    "override",
    ["question=other", "repetitions.min=2", "timeout=5", "seed=4", "controls=[base-unchanged, finite]"],
)
def test_what_is_not_asked_of_the_cell_leaves_its_hash(cells, by_point, override):
    before, after = by_point(cells()), by_point(cells(overrides=[override]))
    assert before["fork", 2].hash == after["fork", 2].hash


def test_identical_arms_are_different_cells(cells, by_point):
    found = by_point(cells(("{sharing: fork}", "{sharing: none}")))
    assert found["native", 2].parameters == found["fork", 2].parameters
    assert found["native", 2].hash != found["fork", 2].hash


def test_mappings_merge_and_anything_else_replaces(cells):
    found = cells(("{sharing: fork}", "{base: {seed: 3}, targets: [k]}"))
    assert found[1].parameters["base"] == {"config": "tiny", "path": None, "seed": 3}
    assert found[1].parameters["targets"] == ["k"]
    [replaced, *_] = cells(("{sharing: none}", "{base: {config: null, path: /m}}"))
    assert replaced.parameters["base"] == {"config": None, "path": "/m", "seed": 0}


def test_a_factor_is_a_dotted_key_and_wins_over_parameters(cells):
    found = cells(overrides=["parameters.learners=9", "factors.base.seed=[5, 6]"])
    assert {cell.parameters["base"]["seed"] for cell in found} == {5, 6}
    assert {cell.parameters["learners"] for cell in found} == {2, 4}


def test_lists_stand_for_tuples_and_whole_numbers_for_floats(cells):
    [cell, *_] = cells(overrides=["parameters.rate=1", "parameters.targets=[a, b]"])
    assert cell.parameters["rate"] == 1.0
    assert cells(overrides=["parameters.rate=1.0"])[0].hash == cells(overrides=["parameters.rate=1"])[0].hash


BAD = {
    "unknown parameter": (
        ["parameters.stepz=1"],
        "--set parameters.stepz=1: parameters.stepz: unknown key",
        "'steps'",
    ),
    "unknown inside": (["parameters.base.sed=1"], "parameters.base.sed: unknown key 'sed'", "'seed'"),
    "unknown in an arm": (["arms.fork.shring=none"], "arms.fork.shring: unknown key 'shring'", "'sharing'"),
    "unknown factor": (["factors.learnrs=[1]"], "factors.learnrs: unknown key 'learnrs'", "'learners'"),
    "unknown factor inside": (["factors.base.sede=[1]"], "factors.base.sede: unknown key 'sede'", "'seed'"),
    "unknown root": (["factors.bse.seed=[1]"], "factors.bse.seed: unknown key 'bse'", "'base'"),
    "wrong level": (
        ["factors.sharing=[none, frok]", "arms={a: {}}"],
        "must be 'none' or 'fork', not 'frok'",
        "'fork'",
    ),
    "text for a number": (
        ["parameters.steps='20'"],
        "parameters.steps: must be a whole number, not '20'",
        "correct",
    ),
    "number for text": (
        ["parameters.name=1.10"],
        "parameters.name: must be a string, not the number 1.1",
        "quotes",
    ),
    "not a mapping": (["factors.steps.x=[1]"], "factors.steps.x: 'steps' is not a mapping", "dotted key"),
    "arm sets a factor": (
        ["arms.fork.learners=3"],
        "arm 'fork' sets 'learners', which is a factor",
        "remove it",
    ),
    "level twice": (["factors.learners=[2, 4, 2]"], "factors.learners: level 2 is listed twice", "once"),
    "level twice, written otherwise": (["factors.rate=[1, 1.0]"], "level 1.0 is listed twice", "once"),
    "zero learners": (
        ["factors.learners=[0]"],
        "factors.learners: must be greater than or equal to 1",
        "correct",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_each_mistake_names_arm_or_factor_and_the_nearest_key(cells, name):
    overrides, problem, remedy = BAD[name]
    with pytest.raises(UserError) as caught:
        cells(overrides=overrides)
    assert problem in caught.value.problem.replace("[2]", "").replace("[1]", "").replace("[0]", "")
    assert remedy in caught.value.remedy


def test_mistakes_in_the_file_name_its_line(cells):
    with pytest.raises(UserError, match=r"scale\.yaml: arms\.fork\.shared \(line 9\): unknown key 'shared'"):
        cells(("{sharing: fork}", "{shared: fork}"))


def test_true_is_not_one(read, workload):
    loaded = read(overrides=["factors.name=['1', 'true']"])
    assert len(expand(loaded.study, workload)) == 8
