"""The tokenizer of a token cache: one given, or one trained on the corpus itself; kept in the cache beside its tokens.

Its pipeline travels to the workers as JSON, so that they need no transformers and all tokenize alike. Nothing in it may
drop a token or invent one: truncation is off, nothing is added, and what looks like a special token in a text is text.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coresident.errors import UserError
from coresident.text import tokenizer
from coresident.text.cache import LITTLE

LARGEST = 1 << 16
# Files that make up a tokenizer in a Hugging Face directory, as far as it has them.
_PARTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "merges.txt",
)


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer ready to use: its pipeline as JSON, one more than its largest token, and the token that ends a document."""

    pipeline: str
    size: int
    end: int


def train(texts: Iterable[str], size: int, into: Path) -> Vocabulary:
    """Train a byte-level BPE of at most `size` tokens on texts, write it into a directory and return it."""
    if size > LARGEST:
        raise UserError(*_too_large("vocabulary", size))
    from tokenizers import Tokenizer

    with _panics("a text"):
        tokenizer.train_byte_bpe(texts, size, into)
    trained = Tokenizer.from_file(str(into / "tokenizer.json"))
    return _checked(trained, trained.get_vocab()[tokenizer.END], str(into))


def adopt(given: Path, into: Path) -> Vocabulary:
    """Copy the tokenizer of a Hugging Face directory into another one and return it.

    Raises UserError where there is none, where it is not a fast one or names no end token, and above 65,536 tokens.
    """
    original = _fast(given)
    into.mkdir(parents=True, exist_ok=True)
    for name in _PARTS:
        if (given / name).is_file():
            shutil.copyfile(given / name, into / name)
    # A directory's config.json can decide how transformers reads its tokenizer; without it the copy may be another one.
    if _pipeline(_fast(into)) != _pipeline(original):
        original.save_pretrained(into)
    return _checked(original.backend_tokenizer, original.eos_token_id, str(given))


def encoder(vocabulary: Vocabulary) -> Any:
    """The `tokenizers.Tokenizer` of a vocabulary: whole texts in, no token added, none taken away."""
    from tokenizers import Tokenizer

    made = Tokenizer.from_str(vocabulary.pipeline)
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = True
    return made


@dataclass(frozen=True)
class Encoded:
    """Documents as tokens: little-endian uint16, how many documents they are, and how many bytes of text (UTF-8)."""

    tokens: bytes
    documents: int
    text_bytes: int


def encode(encoder: Any, end: int, texts: Sequence[str]) -> Encoded:
    """The tokens of documents one after the other, `end` after each."""
    parts = []
    for text in texts:
        # One at a time: a batch would start threads of its own in each worker.
        with _panics(f"the text of {len(text):,} characters that begins with {text[:40]!r}"):
            (encoded,) = encoder.encode_batch_fast([text], add_special_tokens=False)
        parts.append(np.array([*encoded.ids, end], LITTLE).tobytes())
    return Encoded(b"".join(parts), len(texts), sum(len(text.encode()) for text in texts))


@contextmanager
def _panics(what: str) -> Iterator[None]:
    """`tokenizers` gives up on some texts (millions of spaces in a row) by a panic, which is no `Exception`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"{what} is more than the tokenizer can take: {error}", "divide it, or leave it out"
        ) from None


def _fast(path: Path) -> Any:
    loaded = tokenizer.load(path)
    if not loaded.is_fast:
        raise UserError(
            f"the tokenizer in {path} has no fast form",
            "save it as tokenizer.json (convert it with transformers)",
        )
    return loaded


def _pipeline(loaded: Any) -> str:
    return str(loaded.backend_tokenizer.to_str())


def _checked(made: Any, end: int, where: str) -> Vocabulary:
    size = max(made.get_vocab(with_added_tokens=True).values()) + 1
    if size > LARGEST:
        raise UserError(*_too_large(f"the tokenizer in {where}", size))
    return Vocabulary(made.to_str(), size, end)


def _too_large(what: str, size: int) -> tuple[str, str]:
    return (
        f"{what} has {size:,} tokens, and a token cache holds at most {LARGEST:,} (uint16)",
        "give a tokenizer with fewer, or let one be trained (vocabulary: 32000)",
    )
