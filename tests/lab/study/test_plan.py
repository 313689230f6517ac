"""A run directory is added to and never quietly changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coresident.errors import UserError
from coresident.lab.study.plan import Plan, fingerprint, reconcile


@pytest.fixture
def plan(read, workload):
    def plan(*overrides: str, after: Plan | None = None, has_data: bool = True) -> Plan:
        return reconcile(after, read(overrides=overrides).study, workload, has_data)

    return plan


@pytest.mark.parametrize(
    "override",
    [
        "question=x",
        "repetitions.min=2",
        "arms.third={}",
        "factors.learners=[2,4,8]",
        "controls=[base-unchanged, finite]",
        "hypotheses={}",
        "timeout=9",
        "seed=1",
        "parameters.rate=0.5",
        "parameters.base={seed: 0, config: tiny}",
    ],
)
def test_the_fingerprint_ignores_what_changes_no_number(read, workload, override):
    assert fingerprint(read().study, workload) == fingerprint(read(overrides=[override]).study, workload)


@pytest.mark.parametrize("override", ["parameters.steps=21", "controls=[finite]", "parameters.base.seed=1"])
def test_the_fingerprint_covers_parameters_and_controls(read, workload, override):
    assert fingerprint(read().study, workload) != fingerprint(read(overrides=[override]).study, workload)


def test_parameters_that_only_an_arm_completes_have_a_fingerprint(read, workload):
    partial = read(overrides=["parameters={base: {path: /m, config: tiny}, sharing: other}"]).study
    assert len(fingerprint(partial, workload)) == 64


def test_arms_and_levels_may_be_added_and_stay(plan):
    first = plan(has_data=False)
    second = plan("arms.third={steps: 3}", "factors.learners=[8, 2]", after=first)
    assert list(second.arms) == ["native", "fork", "third"]
    assert second.factors == {"learners": [2, 4, 8]}
    assert second.fingerprint == first.fingerprint
    third = plan(after=second)
    assert "third" in third.arms and third.factors == {"learners": [2, 4, 8]}
    with pytest.raises(UserError, match=r"arms\.third\.steps changed from 3 to 4"):
        plan("arms.third={steps: 4}", after=third)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("parameters.steps=40", "parameters.steps changed from 20 to 40"),
        ("parameters.base.seed=2", "parameters.base.seed changed from 0 to 2"),
        ("parameters.rate=0.25", "parameters.rate changed from 0.5 to 0.25"),
        ("arms.fork.steps=3", "arms.fork.steps was added"),
        ("arms.fork={}", "arms.fork.sharing was removed"),
        ("controls=[finite]", "controls changed from"),
        ("factors.steps=[1]", 'factors changed from ["learners"] to ["learners","steps"]'),
        ("study=other", "this run directory holds study 'scale', not 'other'"),
    ],
)
def test_whatever_else_changes_is_refused_by_name(plan, override, problem):
    with pytest.raises(UserError) as caught:
        plan(override, after=plan(has_data=False))
    assert problem in caught.value.problem
    assert "--out" in caught.value.remedy


def test_a_hypothesis_before_data_is_not_post_hoc(plan):
    first = plan(has_data=False)
    assert first.post_hoc == frozenset()
    changed = plan("hypotheses.H1.expect.ratio.at_least=0.9", after=first, has_data=False)
    assert changed.post_hoc == frozenset()
    assert plan("hypotheses.H1.expect.ratio.at_least=0.9", after=changed).post_hoc == frozenset()


@pytest.mark.parametrize("override", ["hypotheses.H1.expect.ratio.at_least=0.9", "noise_floor=0.05"])
def test_a_hypothesis_changed_after_data_is_post_hoc_for_good(plan, override):
    first = plan(has_data=False)
    changed = plan(override, after=first)
    assert changed.post_hoc == {"H1"}
    assert plan(override, after=changed).post_hoc == {"H1"}
    assert plan(after=changed).post_hoc == {"H1"}
    assert plan("hypotheses={}", after=changed).post_hoc == {"H1"}


def test_a_hypothesis_added_after_data_is_post_hoc_and_others_are_not(plan, read, workload):
    first = plan(has_data=False)
    new = "{claim: c, metric: speed, compare: {arm: fork}, expect: {value: {at_least: 1}}}"
    assert plan(f"hypotheses.H2={new}", after=first).post_hoc == {"H2"}
    assert plan("repetitions.max=12", "timeout=5", after=first).post_hoc == frozenset()


def test_data_without_a_plan_makes_every_hypothesis_post_hoc(plan):
    assert plan(has_data=True).post_hoc == {"H1"}


def test_a_plan_is_read_as_it_was_written(plan, tmp_path):
    path = tmp_path / "plan.json"
    first = plan("factors.name=['1', 'true']", "factors.rate=[1, 0.5]", has_data=False)
    path.write_text(first.text())
    assert Plan.read(path) == first


@pytest.fixture
def newer(workload):
    """The workload as a later version of it: with two more parameters."""

    class NewerBase(type(workload.parameters().base)):
        tied: bool = True

    class Newer(workload.parameters):
        momentum: float = 0.9
        base: NewerBase = NewerBase(config="tiny")

    return replace(workload, parameters=Newer)


@pytest.mark.parametrize("said", [[], ["parameters.momentum=0.9", "parameters.base.tied=true"]])
def test_a_parameter_that_came_later_is_no_change_while_it_has_its_default(plan, read, newer, said):
    begun = plan()
    assert reconcile(begun, read(overrides=said).study, newer, has_data=True) == begun


def test_a_parameter_that_came_later_is_a_change_with_another_value(plan, read, newer):
    with pytest.raises(UserError, match=r"parameters\.momentum changed from 0\.9 to 0\.5"):
        reconcile(plan(), read(overrides=["parameters.momentum=0.5"]).study, newer, has_data=True)


@pytest.mark.parametrize("content", ["{", "{}", '{"schema_version": 2}', "[]"])
def test_what_is_no_plan_is_named(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"plan\.json is not a plan"):
        Plan.read(path)


def test_late_names_what_was_added_or_changed_after_data_and_only_that():
    from coresident.lab.study.plan import Claim, late

    def plan(**claims):
        return Plan(
            study="s", fingerprint="f", workload="w", parameters={}, controls=[], arms={}, factors={},
            hypotheses={name: Claim(hash=h, post_hoc=p) for name, (h, p) in claims.items()},
        )  # fmt: skip

    before = plan(H1=("a", False), H2=("a", True), H3=("a", False))
    after = plan(H1=("b", True), H2=("a", True), H3=("a", False), H4=("a", True))
    assert late(before, after) == [
        "H1 was changed after data was seen: it is marked post hoc for good",
        "H4 was added after data was seen: it is marked post hoc for good",
    ]
    assert late(None, plan(H1=("a", False))) == []
