"""Corpora: which documents there are, in which order, of which family, and which are held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from coresident.errors import UserError
from coresident.text import pythonsources
from coresident.text.corpus import CorpusSource, Document, documents, families, left_out


def _files(**families: Path | list[Path]) -> dict[str, tuple[str, ...]]:
    return {
        family: tuple(map(str, paths if isinstance(paths, list) else [paths]))
        for family, paths in families.items()
    }


def _texts(paths: Path | list[Path], **more: Any) -> list[str]:
    return [one.text for one in documents(CorpusSource(kind="files", files=_files(web=paths), **more))]


def _lines(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


# Python's own


@pytest.fixture(scope="module")
def python() -> list[Document]:
    return list(documents(CorpusSource(limit=1_500_000, validation_share=0.1)))


def test_python_itself_gives_code_and_prose_on_every_machine(python: list[Document]) -> None:
    assert families(CorpusSource()) == ("code", "prose")
    for family, has in (("code", "import "), ("prose", "exception")):
        own = [one.text for one in python if one.family == family]
        assert 1_500_000 <= sum(len(text.encode()) for text in own) < 4_000_000
        assert sum(has in text for text in own) > 20
        assert len(set(own)) == len(own)
        assert all(own)


def test_a_share_of_the_documents_is_held_out_and_no_limit_moves_one(python: list[Document]) -> None:
    share = sum(one.validation for one in python) / len(python)
    assert 0.05 < share < 0.15
    fewer = list(documents(CorpusSource(limit=200_000, validation_share=0.1), "code"))
    assert fewer == [one for one in python if one.family == "code"][: len(fewer)]


@pytest.fixture(scope="module")
def modules() -> dict[str, list[tuple[str, str]]]:
    return {family: list(pythonsources.texts(family, False)) for family in ("code", "prose")}


def test_a_module_is_held_out_together_with_its_docstrings(modules: dict[str, list[tuple[str, str]]]) -> None:
    prose = {module for _, module in modules["prose"] if not module.startswith("topic")}
    assert prose < {module for _, module in modules["code"]}

    held = CorpusSource(validation_share=0.5, limit=700_000)
    sides: dict[str, set[bool]] = {}
    for family, own in modules.items():
        for document, (text, module) in zip(documents(held, family), own, strict=False):
            assert document.text == text
            sides.setdefault(module, set()).add(document.validation)
    assert all(len(side) == 1 for side in sides.values())


def test_prose_is_docstrings_and_code_is_the_source_as_it_is(
    modules: dict[str, list[tuple[str, str]]],
) -> None:
    import textwrap as module

    code, prose = (
        next(text for text, name in modules[family] if name == "0/textwrap.py")
        for family in ("code", "prose")
    )
    assert module.__file__ is not None
    assert code == Path(module.__file__).read_text()
    assert prose.startswith("Text wrapping and filling.")
    assert "Wrap a single paragraph of text, returning a list of wrapped lines." in prose
    assert "def " not in prose


# Files


def test_files_are_read_by_their_kind_in_the_order_given(tmp_path: Path) -> None:
    plain = tmp_path / "b.txt"
    plain.write_bytes("\ufeffone\n\ntwo, naïve\n".encode())
    lines = _lines(tmp_path / "a.jsonl", {"text": "three", "image": "x.png"}, {"text": ""}, {"text": "日本"})
    assert _texts([plain, lines]) == ["one\n\ntwo, naïve\n", "three", "", "日本"]
    assert _texts(tmp_path) == ["three", "", "日本", "one\n\ntwo, naïve\n"]
    _lines(tmp_path / "C.JSONL", {"text": "four"})
    (tmp_path / "D.TXT").write_text("five")
    assert _texts(tmp_path)[:2] == ["four", "five"]
    assert _texts(plain, separator="\n\n") == ["one", "two, naïve\n"]


def test_validation_files_are_validation_and_then_nothing_else_is(tmp_path: Path) -> None:
    train = _lines(tmp_path / "t.jsonl", *({"text": f"train {n}"} for n in range(50)))
    held = _lines(tmp_path / "v.jsonl", {"text": "held out"})
    source = CorpusSource(
        kind="files", files=_files(a=train, b=train), validation=_files(a=held), validation_share=0.5
    )
    found = list(documents(source))
    assert [one for one in found if one.validation] == [Document("held out", "a", True)]
    assert len(found) == 101
    with pytest.raises(ValidationError, match=r"t\.jsonl is trained on too"):
        CorpusSource(kind="files", files=_files(a=train), validation=_files(a=train))


def test_text_that_is_trained_on_under_another_name_is_no_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "all").mkdir()
    _lines(tmp_path / "all" / "t.jsonl", {"text": "x"})
    (tmp_path / "link.jsonl").symlink_to("all/t.jsonl")
    for trained, held in (
        ("all/t.jsonl", "all/../all/t.jsonl"),
        ("all/t.jsonl", str(tmp_path / "all/t.jsonl")),
        ("all/t.jsonl", "link.jsonl"),
        ("all", "all/t.jsonl"),
        ("all/t.jsonl", "all"),
    ):
        with pytest.raises(ValidationError, match=rf"validation: {held} is trained on too"):
            CorpusSource(kind="files", files={"a": (trained,)}, validation={"a": (held,)})
    CorpusSource(kind="files", files={"a": ("all",)}, validation={"a": ("all2/t.jsonl",)})


def test_a_limit_ends_each_family_with_the_document_that_reaches_it(tmp_path: Path) -> None:
    lines = _lines(tmp_path / "t.jsonl", *({"text": "ä" * 5} for _ in range(9)))
    assert len(_texts(lines, limit=20)) == 2
    assert len(_texts(lines, limit=21)) == 3


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.txt", b"all well\0", r"x\.txt is binary: byte 9 is NUL"),
        ("x.txt", b"caf\xe9", r"x\.txt is not text: byte 4 is not UTF-8"),
        ("x.txt", b"", "no text of family 'web'"),
        ("x.jsonl", b"", r"x\.jsonl holds no document"),
        ("x.jsonl", b'{"text": ""}\n', "no text of family 'web'"),
        ("x.jsonl", b'{"text": "a"}\n{"text": 1}\n', r"x\.jsonl line 2: 'text' is no string"),
        ("x.jsonl", b'{"txt": "a"}\n', r"x\.jsonl line 1: 'text' is missing.*source\.field"),
        ("x.jsonl", b'{"text": "a"\n', r"x\.jsonl line 1: not JSON at column 13"),
        ("x.jsonl", b'{"text": "\\ud800"}\n', r"x\.jsonl line 1: 'text' holds half a surrogate pair"),
        ("x.jsonl", b"\xff\n", r"x\.jsonl line 1: byte 1 is not UTF-8"),
    ],
)
def test_what_is_no_text_is_an_error_that_names_the_place(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        _texts(tmp_path / name)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    for name in ("x.txt", "x.jsonl", "x.json.gz"):
        with pytest.raises(UserError, match=rf"{name} cannot be read: No such file"):
            _texts(tmp_path / name)
    with pytest.raises(UserError, match="holds no text; give files that end in"):
        _texts(tmp_path)


def test_what_is_left_out_is_counted_by_family_and_suffix(tmp_path: Path) -> None:
    for place in ("a", "a/deep", "b", "held"):
        (tmp_path / place).mkdir()
    for name in ("a/1.txt", "a/2.PNG", "a/deep/3.png", "a/4.pdf", "b/5.md", "b/6.json.gz", "held/7.txt.gz"):
        (tmp_path / name).touch()
    a, b, held = (str(tmp_path / name) for name in ("a", "b", "held"))
    # Given by its name, a file is read whatever it is called; given twice, it is left out once.
    source = CorpusSource(
        kind="files", files={"x": (a, a, f"{a}/4.pdf"), "y": (b,)}, validation={"y": (held,)}
    )
    assert left_out(source) == {"x": {".png": 2, ".pdf": 1}, "y": {".txt.gz": 1}}
    assert left_out(CorpusSource(kind="files", files={"y": (b, f"{b}/none.txt")})) == {}
    assert left_out(CorpusSource()) == {}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "files"}, "files: needed by kind `files`"),
        ({"files": {"a": ("x",)}}, "files: needed by kind `files`"),
        ({"kind": "hub"}, "dataset: needed by kind `hub`"),
        ({"kind": "files", "files": {"a": ("x",)}, "validation": {"b": ("y",)}}, "b is no family"),
        ({"kind": "files", "files": {"a b": ("x",)}}, "should match pattern"),
        ({"kind": "files", "files": {"a": ("x",)}, "separator": ""}, "separator: empty"),
    ],
)
def test_settings_that_say_nothing_sensible_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        CorpusSource(**settings)
