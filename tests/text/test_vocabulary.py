"""The tokenizer of a cache: nothing a given one says makes it drop a token, invent one, or exceed uint16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coresident.errors import UserError
from coresident.text import tokenizer
from coresident.text.vocabulary import Vocabulary, adopt, encode, encoder, train


def _tokens(own: Vocabulary, *texts: str) -> list[int]:
    return np.frombuffer(encode(encoder(own), own.end, texts).tokens, "<u2").tolist()


def _changed(original: Path, into: Path, change: Any) -> Path:
    into.mkdir()
    described = json.loads((original / "tokenizer.json").read_text())
    change(described)
    (into / "tokenizer.json").write_text(json.dumps(described))
    (into / "tokenizer_config.json").write_bytes((original / "tokenizer_config.json").read_bytes())
    return into


def test_a_trained_one_ends_each_document_and_is_what_transformers_loads(tmp_path: Path) -> None:
    own = train(["the cat sat on the mat. " * 40], 300, tmp_path)
    loaded = tokenizer.load(tmp_path)
    assert own.end == loaded.eos_token_id
    assert own.size == len(loaded)
    found = _tokens(own, "the mat", "", "naïve 日本")
    assert found == [*loaded("the mat").input_ids, own.end, own.end, *loaded("naïve 日本").input_ids, own.end]


def test_a_given_one_is_copied_and_gives_the_same_tokens(small_tokenizer: Path, tmp_path: Path) -> None:
    own = adopt(small_tokenizer, tmp_path / "copy")
    loaded = tokenizer.load(tmp_path / "copy")
    assert (tmp_path / "copy/tokenizer.json").read_bytes() == (
        small_tokenizer / "tokenizer.json"
    ).read_bytes()
    assert _tokens(own, "the cat") == [*loaded("the cat").input_ids, own.end]


def test_what_looks_like_an_end_inside_a_text_is_text(small_tokenizer: Path, tmp_path: Path) -> None:
    own = adopt(small_tokenizer, tmp_path / "copy")
    found = _tokens(own, f"a{tokenizer.END}b")
    assert found.count(own.end) == 1
    assert encoder(own).decode(found[:-1]) == f"a{tokenizer.END}b"


def test_truncation_padding_and_added_tokens_of_a_given_one_are_off(
    small_tokenizer: Path, tmp_path: Path
) -> None:
    def change(described: dict[str, Any]) -> None:
        described["truncation"] = {
            "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0
        }  # fmt: skip
        described["padding"] = {
            "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 1, "pad_type_id": 0, "pad_token": tokenizer.PADDING,
        }  # fmt: skip
        start = {"SpecialToken": {"id": tokenizer.MESSAGE_START, "type_id": 0}}
        described["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {
                tokenizer.MESSAGE_START: {
                    "id": tokenizer.MESSAGE_START, "ids": [2], "tokens": [tokenizer.MESSAGE_START]
                }
            },
        }  # fmt: skip

    given = _changed(small_tokenizer, tmp_path / "given", change)
    plain = adopt(small_tokenizer, tmp_path / "plain")
    text = "the dog sat on the cat, the cat sat on the mat"
    assert _tokens(adopt(given, tmp_path / "copy"), text) == _tokens(plain, text)


def test_more_tokens_than_uint16_holds_are_refused(small_tokenizer: Path, tmp_path: Path) -> None:
    def change(described: dict[str, Any]) -> None:
        described["added_tokens"].append(
            {
                "id": 1 << 16, "content": "<far>", "special": True, "single_word": False,
                "lstrip": False, "rstrip": False, "normalized": False,
            }
        )  # fmt: skip
        vocabulary = described["model"]["vocab"]
        for number in range(len(vocabulary), 1 << 16):
            vocabulary[f"token {number}"] = number

    given = _changed(small_tokenizer, tmp_path / "given", change)
    with pytest.raises(UserError, match=r"given has 65,537 tokens, and a token cache holds at most 65,536"):
        adopt(given, tmp_path / "copy")


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no tokenizer"):
        adopt(tmp_path, tmp_path / "copy")


def test_what_the_tokenizer_gives_up_on_is_an_error_and_not_a_panic(
    small_tokenizer: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = adopt(small_tokenizer, tmp_path / "copy")
    with pytest.raises(
        UserError, match=r"the text of 10,000,001 characters that begins with 'a    .*divide it"
    ):
        _tokens(own, "a" + " " * 10_000_000)
    capfd.readouterr()


@pytest.mark.parametrize("model_type", ["llama", "olmoe"])
def test_beside_the_config_of_an_exported_model_it_is_still_itself(
    small_tokenizer: Path, tmp_path: Path, model_type: str
) -> None:
    own = adopt(small_tokenizer, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    text = "It's 1234 —  the cat\n\n    sat(x)"
    assert [*tokenizer.load(tmp_path)(text).input_ids, own.end] == _tokens(own, text)
