"""Studies by name, and the file that a new one starts from."""

from __future__ import annotations

import pytest

from coresident.errors import UserError
from coresident.lab.study.library import find, shipped, study_name, template
from coresident.lab.study.load import load, load_text


def test_every_shipped_study_loads_under_its_own_name():
    assert shipped()
    for name, path in shipped().items():
        assert load(name).study.study == name
        assert find(name) == path


def test_an_unknown_name_names_the_nearest():
    name = next(iter(shipped()))
    with pytest.raises(UserError) as caught:
        find(name[:-1])
    assert name in caught.value.remedy


def test_the_template_is_a_valid_study():
    loaded = load_text(template("mine"), "mine.yaml")
    assert loaded.study.study == "mine"
    assert loaded.study.hypotheses


@pytest.mark.parametrize("name", ["", "a/b", "../x", "-x", "a" * 65])
def test_a_name_must_be_usable(name):
    with pytest.raises(UserError, match="not usable"):
        template(name)


def test_a_file_s_name_is_taken_for_the_study_s(tmp_path):
    assert study_name("mine.yaml") == study_name("mine") == "mine"
    (tmp_path / "mine.yaml").write_text(template("mine.yaml"))
    assert load(tmp_path / "mine.yaml").study.study == "mine"


def test_the_template_shows_a_shell_line_that_reports_a_metric():
    text = template("mine")
    shown = text.replace("  # reporting:", "  reporting:").replace("  #   ", "    ")
    assert "CORESIDENT_EVENTS" in load_text(shown, "mine.yaml").study.arms["reporting"]["shell"]
