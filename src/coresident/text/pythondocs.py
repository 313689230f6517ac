"""Real text that is on every machine: the language reference in Python's own `pydoc_data.topics`.

It serves twice: as a corpus for a tokenizer, and as preference pairs in which the chosen completion is how a
passage truly goes on and the rejected one is how another passage does.
"""

from __future__ import annotations

import random
from functools import cache

from coresident.errors import MachineError
from coresident.text.preferences import Pair

# Characters of one token, at most: English in a byte-level vocabulary of a few thousand tokens has about
# four.
_PER_TOKEN = 4
# Bytes of one token on average over a passage, at most, in any tokenizer that knows English.
_PER_TOKEN_SURELY = 8


@cache
def corpus() -> tuple[str, ...]:
    """The topics' texts, in the order of their names (about half a megabyte)."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise MachineError(
            "this Python has no pydoc_data.topics", "install Python's complete standard library"
        ) from None
    return tuple(topics[name] for name in sorted(topics))


def pairs(count: int, seed: int, length: int = 256, fill: bool = False) -> list[Pair]:
    """`count` pairs whose sequences fill up to about `length` tokens, or with `fill` at least `length`; the seed
    gives the shard (learner k takes 100 + k).

    A prompt has at most half of `length` bytes, so whatever the tokenizer it leaves a completion within
    `length` tokens.
    """
    source = random.Random(f"python-docs:{seed}")  # noqa: S311
    made: list[Pair] = []
    while len(made) < count:
        start, chosen = _passage(source, length, fill)
        _, rejected = _passage(source, length, fill)
        if chosen != rejected:
            made.append(Pair(start, chosen, rejected))
    return made


def _passage(source: random.Random, length: int, fill: bool) -> tuple[str, str]:
    """A random passage that starts with a paragraph, cut in two between words: its start and the rest."""
    prompt_bytes = source.randint(max(4, length // 4), max(5, length // 2))
    rest = source.randint(length, _PER_TOKEN * length) - prompt_bytes
    while True:
        topic, place = source.choice(_paragraphs())
        if fill:
            text = _onward(topic, place, prompt_bytes + _PER_TOKEN_SURELY * length)
        else:
            text = corpus()[topic][place : place + prompt_bytes + rest]
        cut = _word_end(text, prompt_bytes)
        start, following = text[:cut], text[cut : _word_end(text, len(text))]
        if start.strip() and following.strip():
            return start, following


def _onward(topic: int, place: int, size: int) -> str:
    """`size` characters from there, going on with the next topics and at the end with the first one."""
    parts, there = [corpus()[topic][place:]], len(corpus()[topic]) - place
    while there < size:
        topic = (topic + 1) % len(corpus())
        parts.append(corpus()[topic])
        there += len(parts[-1])
    return "".join(parts)[:size]


@cache
def _paragraphs() -> tuple[tuple[int, int], ...]:
    """Where paragraphs of running text start: (topic, character)."""
    places = []
    for topic, text in enumerate(corpus()):
        place = 0
        for paragraph in text.split("\n\n"):
            if len(paragraph) > 80 and paragraph[0].isalpha():
                places.append((topic, place))
            place += len(paragraph) + 2
    return tuple(places)


def _word_end(text: str, limit: int) -> int:
    """The last end of a word such that the text before it has at most `limit` bytes."""
    head = text.encode()[:limit].decode(errors="ignore")
    cut = max(head.rfind(" "), head.rfind("\n"))
    return cut if cut > 0 else len(head)
