"""Files of texts to imitate: TRL's three forms are read, and every bad line is named with file, line and remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coresident.errors import UserError
from coresident.text.samples import Sample, read

USER = [{"role": "user", "content": "hi"}]
ANSWER = [{"role": "assistant", "content": "hello"}]


def test_all_forms_are_read(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    lines = [
        {"prompt": "p", "completion": "c", "score": 3},
        {"prompt": USER, "completion": ANSWER},
        {"messages": [*USER, *ANSWER]},
        {"text": "all of it"},
    ]
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    assert read(file) == [
        Sample("p", "c", f"{file} line 1"),
        Sample(tuple(USER), tuple(ANSWER), f"{file} line 3"),
        Sample(None, (*USER, *ANSWER), f"{file} line 5"),
        Sample(None, "all of it", f"{file} line 7"),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "p"}', "'completion' is missing"),
        ('{"completion": "c"}', "it has none of 'prompt', 'messages' and 'text'"),
        ('{"prompt": "p", "completion": "c", "text": "t"}', "it has 'prompt' and 'text'"),
        (json.dumps({"prompt": "p", "completion": ANSWER}), "text and chat messages are mixed"),
        ('{"messages": "m"}', "'messages' is of the wrong kind"),
        (json.dumps({"text": USER}), "'text' is of the wrong kind"),
        ('{"text": " "}', "'text' is empty"),
        ('{"text": "t", "tools": [1]}', "'tools' is not supported"),
        ('{"text": ', "not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(f'{{"text": "t"}}\n{line}\n')
    with pytest.raises(UserError) as caught:
        read(file)
    assert caught.value.problem.startswith(f"{file} line 2: {problem}")
    assert caught.value.remedy


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(
        UserError, match=r"none\.jsonl holds no sample; give one JSON object a line with prompt"
    ):
        read(tmp_path / "none.jsonl")
