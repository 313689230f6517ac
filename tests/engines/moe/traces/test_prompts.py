"""Which prompts are traced, and on which side of the split each is."""

from collections import Counter
from pathlib import Path

import pytest

from coresident.engines.moe.traces import builtin
from coresident.engines.moe.traces.prompts import Prompt, divided, read, write
from coresident.errors import UserError


def _many(count: int, family: str = "code") -> list[Prompt]:
    return [Prompt(f"{family}-{number}", family, f"text {number} of {family}") for number in range(count)]


def test_each_family_is_divided_and_no_text_is_on_both_sides() -> None:
    found = divided([*_many(10), *_many(7, "prose")], 0.5)
    assert Counter((one.family, one.split) for one in found) == {
        ("code", "held-out"): 5,
        ("code", "fit"): 5,
        ("prose", "held-out"): 4,
        ("prose", "fit"): 3,
    }
    sides = {side: {one.text for one in found if one.split == side} for side in ("fit", "held-out")}
    assert not sides["fit"] & sides["held-out"]


def test_a_prompts_side_does_not_depend_on_the_files_order() -> None:
    prompts = _many(10)
    one = {prompt.text: prompt.split for prompt in divided(prompts)}
    assert one == {prompt.text: prompt.split for prompt in divided(prompts[::-1])}


def test_equal_prompts_are_on_one_side() -> None:
    prompts = [*_many(4), *[Prompt(f"again-{n}", "prose", one.text) for n, one in enumerate(_many(4))]]
    found = divided(prompts)
    assert [one.split for one in found[:4]] == [one.split for one in found[4:]]


def test_a_split_that_is_asked_for_is_kept() -> None:
    prompts = [Prompt("a", "code", "x", "fit"), Prompt("b", "code", "y", "held-out")]
    assert [one.split for one in divided(prompts, 1.0)] == ["fit", "held-out"]
    with pytest.raises(UserError, match="both fit and held-out"):
        divided([*prompts, Prompt("c", "code", "x", "held-out")])
    with pytest.raises(UserError, match=r"a share of 1\.5"):
        divided(prompts, 1.5)


def test_a_file_of_prompts_comes_back(tmp_path: Path) -> None:
    asked = [
        Prompt("code-000", "code", "def f():\n"),
        Prompt("prose-001", "prose", "Naïve\u2028 text", "fit"),
    ]
    write(asked, tmp_path / "prompts.jsonl")
    assert read(tmp_path / "prompts.jsonl") == asked


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"family": "code"}', "line 2: 'prompt' is not a text"),
        ('{"prompt": " ", "family": "code"}', "line 2: 'prompt' is not a text"),
        ('{"prompt": "x"}', "line 2: 'family' is not a name"),
        ('{"prompt": "x", "family": "A b"}', "line 2: 'family' is not a name"),
        ('{"prompt": "x", "family": "code", "split": "test"}', "line 2: 'split' is 'test'"),
        ('{"prompt": "x", "family": "code", "weight": 1}', "line 2: the key 'weight' is unknown"),
        ('{"prompt": "x", ', "line 2: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x", "family": "code"}\n' + line + "\n")
    with pytest.raises(UserError) as error:
        read(path)
    assert said in error.value.problem
    assert error.value.remedy


def test_a_file_that_is_empty_or_absent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no prompt"):
        read(tmp_path / "empty.jsonl")


@pytest.fixture(scope="module")
def shipped() -> list[Prompt]:
    return builtin.prompts(11)


def test_there_are_65_built_in_prompts_of_six_families(shipped: list[Prompt]) -> None:
    assert len(shipped) >= 65
    assert Counter(one.family for one in shipped) == dict.fromkeys(builtin.FAMILIES, 11)
    assert len({one.text for one in shipped}) == len({one.name for one in shipped}) == len(shipped)
    assert all(len(one.text) >= 80 for one in shipped)


def test_families_are_what_they_say(shipped: list[Prompt]) -> None:
    texts = {family: [one.text for one in shipped if one.family == family] for family in builtin.FAMILIES}
    assert all(text.lstrip().startswith(("def", "class", "async")) for text in texts["code"] + texts["tests"])
    assert all(text.lstrip().startswith(">>>") for text in texts["sessions"])
    assert all(text.startswith("Compute") and text.endswith("Result:") for text in texts["arithmetic"])


def test_built_in_prompts_are_the_same_every_time(shipped: list[Prompt]) -> None:
    assert builtin.prompts(3, ("reference", "arithmetic")) == [
        one for one in shipped if one.family in ("reference", "arithmetic") and int(one.name[-3:]) < 3
    ]


def test_a_family_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="no built-in prompts of family 'cod'"):
        builtin.prompts(1, ("cod",))
