"""Tokenizers: a byte-level BPE trained here on our own text, and loading one from a Hugging Face directory,
offline.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from coresident.errors import UserError

END = "<|endoftext|>"
PADDING = "<|pad|>"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"
SPECIAL = (END, PADDING, MESSAGE_START, MESSAGE_END)
SMALLEST = 256 + len(SPECIAL)

# How Qwen2 cuts text into words before merging. transformers gives a directory whose config.json says `qwen2`
# exactly this pipeline, whatever its tokenizer.json says, so that a tokenizer trained with another one would
# be loaded as what it is not.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What the trainer does with a word takes the square of its length: ten megabytes without a space would take hours. No token is
# thousands of characters long.
_LONG_WORD = re.compile(r"\S{2048}|\s{2048}")
# ChatML, the plainest of the templates in common use.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Any one of these sets of files makes a tokenizer that transformers can load.
_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("spiece.model",))


def train_byte_bpe(texts: Iterable[str], vocab_size: int, out: Path) -> int:
    """Train a byte-level BPE and write `tokenizer.json` and `tokenizer_config.json` into `out`; return its
    size in tokens.

    The same texts give the same bytes. Text that holds too few pairs to merge gives fewer than `vocab_size`
    tokens. Training runs in threads of its own: never call it in a process that forks afterwards.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if vocab_size < SMALLEST:
        raise UserError(
            f"a byte-level vocabulary of {vocab_size} tokens is too small", f"ask for at least {SMALLEST}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in _parts(text)), trainer)
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PADDING,
        "additional_special_tokens": [MESSAGE_START, MESSAGE_END],
        "model_max_length": 1_000_000,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return int(tokenizer.get_vocab_size())


def _parts(text: str) -> Iterator[str]:
    """A text, cut within words that are too long to be learned from whole; most are in one part."""
    start = 0
    for found in _LONG_WORD.finditer(text):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


def load(path: Path) -> Any:
    """The tokenizer of a Hugging Face directory, from its files alone, without a network and without running
    its code.

    One that names no padding token pads with its end token, as TRL does. Raises UserError where there is none
    to load.
    """
    from transformers import AutoTokenizer

    if not any(all((path / name).is_file() for name in names) for names in _FILES):
        raise UserError(
            f"{path} has no tokenizer (tokenizer.json, tokenizer.model, or vocab.json with merges.txt)",
            "copy the tokenizer's files beside the weights",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UserError(
            f"the tokenizer in {path} cannot be loaded: {_first_line(error)}",
            "copy the tokenizer's files again from their source",
        ) from error
    if tokenizer.eos_token is None:
        raise UserError(
            f"the tokenizer in {path} names no end-of-sequence token",
            "set eos_token in its tokenizer_config.json",
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
