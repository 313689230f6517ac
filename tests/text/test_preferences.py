"""Preference files: TRL's two forms are read, and every bad line is named with file, line and remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coresident.errors import UserError
from coresident.text.preferences import Pair, read

GOOD = '{"prompt": "p", "chosen": "c", "rejected": "r"}'
USER = [{"role": "user", "content": "hi"}]
ANSWER = [{"role": "assistant", "content": "hello"}]


def _with(**changes: object) -> str:
    return json.dumps(json.loads(GOOD) | changes)


def test_text_is_read_in_order_with_its_origin(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(GOOD + "\n\n" + _with(prompt="Grüße\n", score=3) + "\r\n", encoding="utf-8")
    assert read(file) == [
        Pair("p", "c", "r", f"{file} line 1"),
        Pair("Grüße\n", "c", "r", f"{file} line 3"),
    ]


def test_chat_messages_are_read(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": USER, "chosen": ANSWER, "rejected": ANSWER}))
    (pair,) = read(file)
    assert pair.prompt == tuple(USER)
    assert pair.chosen == pair.rejected == tuple(ANSWER)


def test_a_line_separator_inside_a_string_does_not_end_the_line(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(_with(chosen="a\u2028b").encode().decode("unicode_escape"), encoding="utf-8")
    assert read(file)[0].chosen == "a\u2028b"


BAD = {
    "broken JSON": ('{"prompt": "p",', "not JSON at column"),
    "a missing field": ('{"prompt": "p", "chosen": "c"}', "'rejected' is missing"),
    "no explicit prompt": (json.dumps({"chosen": ANSWER, "rejected": ANSWER}), "'prompt' is missing"),
    "a number": (_with(chosen=4), "'chosen' is a number"),
    "null": (_with(rejected=None), "'rejected' is null"),
    "an empty prompt": (_with(prompt=""), "'prompt' is empty"),
    "an empty completion": (_with(chosen=""), "'chosen' is empty"),
    "a blank completion": (_with(rejected=" \n"), "'rejected' is empty"),
    "no message": (json.dumps({"prompt": USER, "chosen": [], "rejected": ANSWER}), "'chosen' is empty"),
    "an empty message": (
        json.dumps({"prompt": USER, "chosen": [{"role": "assistant", "content": ""}], "rejected": ANSWER}),
        "'chosen[0].content' is empty",
    ),
    "a message without a role": (
        json.dumps({"prompt": [{"content": "hi"}], "chosen": ANSWER, "rejected": ANSWER}),
        "'prompt[0]' has the keys content",
    ),
    "a message that is text": (
        json.dumps({"prompt": ["hi"], "chosen": ANSWER, "rejected": ANSWER}),
        "'prompt[0]' is a string",
    ),
    "content in parts": (
        json.dumps({"prompt": [{"role": "user", "content": []}], "chosen": ANSWER, "rejected": ANSWER}),
        "'prompt[0].content' is a list",
    ),
    "text and messages mixed": (_with(prompt=USER), "mixed"),
    "text among messages": (json.dumps({"prompt": USER, "chosen": "c", "rejected": ANSWER}), "mixed"),
    "tools": (_with(tools=[{}]), "'tools' is not supported"),
    "bare NaN": ('{"prompt": "p", "chosen": "c", "rejected": "r", "score": NaN}', "NaN is not JSON"),
    "a number beyond every float": (
        '{"prompt": "p", "chosen": 1e400, "rejected": "r"}',
        "'chosen' is a number",
    ),
    "a key twice": (
        '{"prompt": "p", "chosen": "c", "chosen": "d", "rejected": "r"}',
        "'chosen' is there twice",
    ),
    "a list": ("[1]", "a list where an object is needed"),
    "a bare word": ("NaN", "NaN is not JSON"),
    "half a surrogate": ('{"prompt": "p", "chosen": "\\ud800", "rejected": "r"}', "half a surrogate pair"),
    "a byte order mark": ("\ufeff" + GOOD, "not JSON at column 1"),
    "endless nesting": ("[" * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize(("line", "problem"), BAD.values(), ids=BAD.keys())
def test_a_bad_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(f"{GOOD}\n{line}\n{GOOD}\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read(file)
    assert caught.value.problem.startswith(f"{file} line 2: ")
    assert problem in caught.value.problem
    assert caught.value.remedy


def test_bytes_that_are_not_utf_8_are_named(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_bytes(GOOD.encode() + b"\n" + GOOD.replace("p", "é").encode("latin-1"))
    with pytest.raises(UserError, match=r"pairs\.jsonl line 2: byte \d+ is not UTF-8"):
        read(file)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=r"pairs\.jsonl holds no preference pair"):
        read(file)


def test_a_file_that_is_not_there_or_a_directory_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            read(path)
