"""Which prompts are traced, and on which side of the split each is."""

import shutil
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
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


def test_there_are_66_built_in_prompts_of_six_families(shipped: list[Prompt]) -> None:
    counts = Counter(one.family for one in shipped)
    assert counts.pop("tests") == 11 or not (Path(sysconfig.get_paths()["stdlib"]) / "test").is_dir()
    assert counts == dict.fromkeys(set(builtin.FAMILIES) - {"tests"}, 11)
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


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes some of the real library's packages all that this Python has."""
    real, paths = Path(sysconfig.get_paths()["stdlib"]), sysconfig.get_paths()

    def only(*packages: str) -> None:
        for name in packages:
            shutil.copytree(
                real / name, tmp_path / name, ignore=shutil.ignore_patterns("test*", "__pycache__")
            )
        monkeypatch.setattr(sysconfig, "get_paths", lambda: {**paths, "stdlib": str(tmp_path)})
        builtin._documents.cache_clear()

    yield only
    builtin._documents.cache_clear()


def test_a_library_without_its_tests_gives_the_prompts_that_it_has_and_says_so(
    library: Callable[..., None],
) -> None:
    """As Debian packages it: what still speaks of unittest is unittest itself, and a few modules besides."""
    library("asyncio", "email", "importlib", "json", "unittest", "xml")
    said: list[str] = []
    found = builtin.prompts(14, say=said.append)
    counts = Counter(one.family for one in found)
    assert 0 < counts["tests"] < 14
    assert {counts[family] for family in builtin.FAMILIES if family != "tests"} == {14}
    assert said == [
        f"tests: {counts['tests']} prompts, not 14: this machine's Python has no more text for them"
    ]
    assert builtin.prompts(14) == found
    assert {one.split for one in divided(found) if one.family == "tests"} == {"fit", "held-out"}


def test_a_family_without_any_text_is_left_out(library: Callable[..., None]) -> None:
    library("json")
    said: list[str] = []
    found = builtin.prompts(2, say=said.append)
    assert {one.family for one in found} == set(builtin.FAMILIES) - {"tests"}
    assert [line for line in said if "tests" in line] == [
        "tests: 0 prompts, not 2: this machine's Python has no more text for them"
    ]
    with pytest.raises(UserError, match="for 1 of 2 families") as error:
        builtin.prompts(2, ("tests", "arithmetic"))
    assert "--prompts" in error.value.remedy
    with pytest.raises(UserError, match="for 0 of 1 families"):
        builtin.prompts(2, ("tests",))


def test_a_family_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="no built-in prompts of family 'cod'"):
        builtin.prompts(1, ("cod",))
