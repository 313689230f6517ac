"""What a study file may say, and how each mistake in it is answered: file, key, line, remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from coresident.errors import UserError
from coresident.lab.study.load import load, load_text
from coresident.lab.study.source import read as read_yaml
from coresident.lab.study.source import render

BAD = {
    "unknown key": (
        ("question:", "qestion:"),
        "qestion (line 2): unknown key 'qestion'",
        "did you mean 'question'?",
    ),
    "unknown key inside": (("until:", "untill:"), "repetitions.untill (line 12): unknown key", "'until'"),
    "unknown key in a hypothesis": (
        ("at_least", "at_leest"),
        "expect.ratio.at_leest (line 19)",
        "'at_least'",
    ),
    "missing key": (("workload: toy\n", ""), "the key 'workload' is missing", "add it"),
    "a number for text": (
        ("study: scale", "study: 1.10"),
        "study (line 1): must be a string, not the number 1.1",
        "quotes",
    ),
    "an exponent for text": (
        ("workload: toy", "workload: 1234567e8"),
        "workload (line 3): must be a string",
        "quotes",
    ),
    "text for a number": (
        ("min: 3", "min: '3'"),
        "min (line 12): must be a whole number, not '3'",
        "correct",
    ),
    "a boolean for a number": (
        ("min: 3", "min: true"),
        "min (line 12): must be a whole number, not true",
        "correct",
    ),
    "a fraction of a block": (
        ("min: 3", "min: 3.5"),
        "min (line 12): must be a whole number, not the number 3.5",
        "",
    ),
    "a list for a mapping": (
        ("{sharing: fork}", "[fork]"),
        "arms.fork (line 9): must be a mapping of keys",
        "",
    ),
    "a scalar for a list": (("[2, 4]", "2"), "factors.learners (line 11): must be a list", ""),
    "a nested level": (
        ("[2, 4]", "[2, [4]]"),
        "factors.learners[1] (line 11): must be a string or",
        "correct",
    ),
    "duplicate key": (
        ("  steps: 20", "  steps: 1\n  steps: 20"),
        "(line 6): duplicate key 'steps', first on line 5",
        "",
    ),
    "empty factor": (("[2, 4]", "[]"), "factors.learners (line 11): must not be empty", "at least one"),
    "no arms": (
        ("arms:\n  native: {sharing: none}\n  fork: {sharing: fork}", "arms: {}"),
        "must not be empty",
        "",
    ),
    "min above max": (("min: 3", "min: 10"), "repetitions (line 12): min (10) is above max (9)", ""),
    "not finite": (
        ("steps: 20", "steps: .nan"),
        "parameters.steps (line 5): .nan is not a finite number",
        "finite",
    ),
    "too large": (
        ("steps: 20", "steps: 1e400"),
        "parameters.steps (line 5): 1e400 is not a finite number",
        "",
    ),
    "out of range": (
        ("half_width: 0.01", "half_width: 1.5"),
        "half_width (line 12): must be less than 1",
        "",
    ),
    "empty value": (
        ("question: Does sharing fit more learners?", "question:"),
        "question (line 2): must be a string",
        "",
    ),
    "blank question": (
        ("Does sharing fit more learners?", "' '"),
        "question (line 2): must not be empty",
        "",
    ),
    "bad name": (("study: scale", "study: a/b"), "study (line 1): 'a/b' is not usable as a name", "letters"),
    "bad arm name": (
        ("  fork:", "  fo rk:"),
        "arms.fo rk (line 9): the name 'fo rk' is not usable",
        "letters",
    ),
    "two expectations": (
        ("{at_least: 0.95}}", "{at_least: 1}, same: true}"),
        "give exactly one of ratio, difference, value",
        "",
    ),
    "number as key": (("  learners:", "  1:"), "factors (line 11): key 1 is not a string", "quotes"),
    "a tag": (("steps: 20", "steps: !!python/name:os 20"), "(line 5): tag", ""),
    "a merge key": (
        ("  steps: 20", "  <<: {a: 1}"),
        "parameters (line 5): key << is not a string",
        "write merged",
    ),
    "broken syntax": (("[2, 4]", "[2, 4"), "not YAML", "syntax"),
    "two documents": (("arms:", "---\narms:"), "not YAML", ""),
    "a directive": (("study: scale", "%YAML 1.1\n---\nstudy: scale"), "line 1: directive '%YAML'", "remove"),
}


@pytest.mark.parametrize("name", BAD)
def test_each_mistake_is_one_sentence_with_file_key_line_and_remedy(read, tmp_path, name):
    replaced, problem, remedy = BAD[name]
    with pytest.raises(UserError) as caught:
        read(replaced)
    assert str(tmp_path / "scale.yaml") in caught.value.problem
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy
    assert "\n" not in str(caught.value)


def test_a_valid_study_keeps_its_own_text(read, study_text):
    loaded = read()
    assert loaded.study.study == "scale"
    assert loaded.text == study_text
    assert loaded.raw["factors"] == {"learners": [2, 4]}


def test_yaml_is_version_1_2():
    value, _ = read_yaml("[on, yes, 1:30, 010, 1e-3, 2024-01-01, '3', 0x1F, ~, true]", "x")
    assert value == ["on", "yes", "1:30", 10, 0.001, "2024-01-01", "3", 31, None, True]


def test_the_first_problem_is_told_and_the_others_counted(read):
    with pytest.raises(UserError, match=r"line 5.*\(the first of 2 problems\)"):
        load_text("study: a\nquestion: b\nworkload: c\narms: {a: {}}\nseed: x\nattempts: 0\n", "s.yaml")


def test_an_alias_without_end_is_refused():
    with pytest.raises(UserError, match="repeats without end"):
        read_yaml("a: &a [*a]", "x")
    bomb = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n"
    bomb += "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 8))
    with pytest.raises(UserError, match="repeats without end"):
        read_yaml(bomb, "x")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "a study is a mapping"),
        (b"- 1", "a study is a mapping"),
        (b"study: \xff", "not UTF-8"),
        (b"a: \x00", "YAML"),
    ],
)
def test_what_is_no_study_at_all(tmp_path, content, problem):
    path = tmp_path / "s.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=problem):
        load(path)


def test_a_path_that_leads_nowhere(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load(tmp_path / "no.yaml")
    with pytest.raises(UserError, match="is a directory"):
        load(tmp_path)
    with pytest.raises(UserError, match="unknown study 'exmaple'"):
        load("exmaple")


def test_set_is_typed_like_the_file(read):
    loaded = read(
        overrides=[
            "repetitions.min=4",
            "factors.learners=[2,8]",
            "parameters.base.seed=7",
            "arms.third={sharing: fork, name: '1'}",
            "hypotheses.H1.expect.ratio.at_least=0.9",
            "factors.base.config=[tiny, large]",
            "question=on",
        ]
    )
    assert loaded.study.repetitions.min == 4
    assert loaded.study.factors == {"learners": [2, 8], "base.config": ["tiny", "large"]}
    assert loaded.study.parameters["base"] == {"config": "tiny", "seed": 7}
    assert loaded.study.arms["third"] == {"sharing": "fork", "name": "1"}
    assert loaded.study.question == "on"
    bound = loaded.study.hypotheses["H1"].expect.ratio
    assert bound is not None and bound.at_least == 0.9


def test_the_text_of_a_study_with_overrides_says_what_ran(read, tmp_path):
    loaded = read(overrides=["parameters.name='1.10'", "seed=3"])
    again = load_text(loaded.text, "again")
    assert again.study == loaded.study
    assert again.study.parameters["name"] == "1.10"


def test_names_with_dots_are_found_by_set(read):
    loaded = read(
        ("  fork:", "  fork.v2:"), ("arm: fork", "arm: fork.v2"), overrides=["arms.fork.v2.steps=3"]
    )
    assert loaded.study.arms["fork.v2"] == {"sharing": "fork", "steps": 3}


@pytest.mark.parametrize(
    ("override", "problem", "remedy"),
    [
        (
            "repetitons.min=2",
            "--set repetitons.min=2: repetitons: unknown key",
            "did you mean 'repetitions'?",
        ),
        ("repetitions.mn=2", "--set repetitions.mn=2: repetitions.mn: unknown key", "'min'"),
        (
            "repetitions.min=x",
            "--set repetitions.min=x: repetitions.min: must be a whole number, not 'x'",
            "",
        ),
        ("repetitions.min=99", "min (99) is above max (9)", ""),
        ("factors.learners=[]", "--set factors.learners=[]: factors.learners: must not be empty", ""),
        ("factors.learners=[1", "--set factors.learners=[1: line 1: not YAML", ""),
        # What follows `factors.` is one name: a new factor.
        ("factors.learners.x=1", "factors.learners.x: must be a list", ""),
        ("study.name=x", "study is not a mapping", ""),
        ("study", "not of the form dotted.key=value", "--set study=VALUE"),
        ("a..b=1", "not of the form", ""),
        ("seed=.inf", "not a finite number", ""),
    ],
)
def test_each_mistake_in_set_is_named(read, override, problem, remedy):
    with pytest.raises(UserError) as caught:
        read(overrides=[override])
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


def test_values_may_replace_top_level_keys(study_text):
    loaded = load_text(study_text, "here", values={"seed": 9})
    assert loaded.study.seed == 9
    assert "seed: 9" in loaded.text


def test_rendering_gives_back_what_was_rendered():
    value = {
        "a": ["1", "true", "1e3", "", None, 1.0, 1e-7, True, "x: y", "é", "line\nbreak", "~"],
        "b": {"c": {}},
    }
    assert read_yaml(render(value), "x")[0] == value


def test_utf8_with_a_mark_and_windows_lines_are_read(tmp_path: Path, study_text):
    path = tmp_path / "s.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + study_text.replace("\n", "\r\n").encode())
    assert load(path).study.study == "scale"
