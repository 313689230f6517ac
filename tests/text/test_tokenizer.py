"""Tokenizers: ours is trained alike each time and is what transformers loads; a directory without one is an
error.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coresident.errors import UserError
from coresident.text import pythondocs, tokenizer

TEXT = "It's 1234 —  “naïve”\n\n    def f(x): return x\t# 日本\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    assert tokenizer.train_byte_bpe(pythondocs.corpus(), 2000, out) == 2000
    return out


def test_training_takes_seconds_and_gives_the_same_bytes_in_another_process(
    trained: Path, tmp_path: Path
) -> None:
    script = f"""
from pathlib import Path
from coresident.text import pythondocs, tokenizer
tokenizer.train_byte_bpe(pythondocs.corpus(), 2000, Path({str(tmp_path)!r}))
"""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", script], check=True)
    assert time.monotonic() - start < 20
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()


def test_transformers_loads_it_whole(trained: Path) -> None:
    loaded = tokenizer.load(trained)
    assert len(loaded) == 2000
    assert (loaded.eos_token, loaded.pad_token) == (tokenizer.END, tokenizer.PADDING)
    assert loaded.eos_token_id != loaded.pad_token_id
    assert loaded.decode(loaded(TEXT)["input_ids"]) == TEXT
    assert loaded(f"a{tokenizer.END}")["input_ids"][-1] == loaded.eos_token_id
    assert len(loaded("exceptions")["input_ids"]) < len("exceptions") / 2


def test_beside_a_qwen2_config_it_is_still_itself(trained: Path, tmp_path: Path) -> None:
    """transformers replaces the pipeline of a qwen2 directory's tokenizer by Qwen2's own."""
    from tokenizers import Tokenizer

    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    plain = Tokenizer.from_file(str(trained / "tokenizer.json")).encode(TEXT).ids
    assert tokenizer.load(tmp_path)(TEXT)["input_ids"] == tokenizer.load(trained)(TEXT)["input_ids"] == plain


def test_its_chat_template_marks_who_speaks(trained: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.load(trained).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_vocabulary_below_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="259 tokens is too small"):
        tokenizer.train_byte_bpe(["a"], 259, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_little_text_gives_fewer_tokens(tmp_path: Path) -> None:
    assert tokenizer.train_byte_bpe(["aaaa"], 1000, tmp_path) < 270


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(UserError, match="has no tokenizer") as caught:
        tokenizer.load(tmp_path)
    assert str(tmp_path) in caught.value.problem


def test_a_broken_tokenizer_is_named(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded"):
        tokenizer.load(tmp_path)


def test_without_an_end_token_it_is_refused_and_without_padding_the_end_token_pads(
    trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((trained / "tokenizer.json").read_bytes())
    described = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match="no end-of-sequence token"):
        tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described | {"eos_token": tokenizer.END}))
    assert tokenizer.load(tmp_path).pad_token == tokenizer.END


@pytest.mark.parametrize("word", ["abc", "e\u0301"], ids=["letters", "marks"])
def test_a_word_without_end_is_learned_from_in_parts(tmp_path: Path, word: str) -> None:
    """A million letters without a space: whole, they would take the trainer minutes, and ten million hours."""
    began = time.monotonic()
    assert tokenizer.train_byte_bpe([word * 300_000, "the end of the text"], 280, tmp_path) > 260
    assert time.monotonic() - began < 20
