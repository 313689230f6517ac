"""Everything that a study names must exist."""

from __future__ import annotations

import dataclasses

import pytest

from coresident.errors import UserError
from coresident.lab.study.cells import expand
from coresident.lab.study.check import check

COMPARE = "hypotheses.H1.compare"
BAD = {
    "control": (["controls=[finit]"], "controls[0]: workload toy answers no control 'finit'", "'finite'"),
    "control twice": (
        ["controls=[finite, finite]"],
        "controls[1]: control 'finite' is listed twice",
        "remove",
    ),
    "metric": (
        ["hypotheses.H1.metric=sped"],
        "hypotheses.H1.metric: workload toy has no metric 'sped'",
        "'speed'",
    ),
    "arm": ([f"{COMPARE}.arm=frok"], f"{COMPARE}.arm: there is no arm 'frok'", "'fork'"),
    "other arm": ([f"{COMPARE}.to=nativ"], f"{COMPARE}.to: there is no arm 'nativ'", "'native'"),
    "itself": ([f"{COMPARE}.to=fork"], "arm 'fork' is compared to itself", "another"),
    "factor": (
        [f"{COMPARE}.at={{lerners: 2}}"],
        f"{COMPARE}.at.lerners: there is no factor 'lerners'",
        "'learners'",
    ),
    "level": ([f"{COMPARE}.at={{learners: 3}}"], "factor 'learners' has no level 3", "known: 2, 4"),
    "level's type": ([f"{COMPARE}.at={{learners: '2'}}"], "factor 'learners' has no level \"2\"", ""),
    "slope": (
        [f"{COMPARE}={{arm: fork, to: native, slope: lerners}}"],
        "slope: there is no factor",
        "'learners'",
    ),
    "slope fixed": ([f"{COMPARE}.slope=learners"], "'learners' cannot vary and be fixed by `at`", "remove"),
    "slope of one": (
        [f"{COMPARE}={{arm: fork, to: native, slope: learners}}", "factors.learners=[2]"],
        "a slope needs two levels",
        "add",
    ),
    "slope of words": (
        [f"{COMPARE}={{arm: fork, to: native, slope: name}}", "factors.name=[a, b]"],
        "a slope needs numeric levels",
        "numeric",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_name_that_is_not_there_is_refused_with_the_nearest(read, workload, name):
    overrides, problem, remedy = BAD[name]
    loaded = read(overrides=overrides)
    with pytest.raises(UserError) as caught:
        check(loaded.study, workload, expand(loaded.study, workload), loaded.source)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


def test_mistakes_in_the_file_name_its_line(read, workload):
    loaded = read(("metric: speed", "metric: sped"))
    with pytest.raises(UserError, match=r"scale\.yaml: hypotheses\.H1\.metric \(line 17\)"):
        check(loaded.study, workload, expand(loaded.study, workload), loaded.source)


@pytest.mark.parametrize("metric", ["speed", "wall_seconds", "peak_memory_mib", "energy_joules"])
def test_the_workloads_metrics_and_the_labs_own_may_be_claimed(read, workload, metric):
    loaded = read(overrides=[f"hypotheses.H1.metric={metric}"])
    check(loaded.study, workload, expand(loaded.study, workload))


def test_an_open_workload_may_report_anything(read, workload):
    loaded = read(overrides=["hypotheses.H1.metric=mine", "controls=[mine]"])
    check(loaded.study, dataclasses.replace(workload, open=True), expand(loaded.study, workload))


def test_a_level_may_be_written_1_or_1_0(read, workload):
    loaded = read(overrides=[f"{COMPARE}.at={{learners: 2.0}}"])
    check(loaded.study, workload, expand(loaded.study, workload))


def test_a_misspelt_control_of_the_lab_is_refused_even_where_any_may_be_answered(read, workload):
    loaded = read(overrides=["controls=[exclusive-devise]"])
    open_one = dataclasses.replace(workload, open=True)
    with pytest.raises(UserError, match=r"nothing answers a control 'exclusive-devise'") as caught:
        check(loaded.study, open_one, expand(loaded.study, open_one))
    assert caught.value.remedy == "did you mean 'exclusive-device'?"
    check(read(overrides=["controls=[warm]"]).study, open_one, expand(loaded.study, open_one))
