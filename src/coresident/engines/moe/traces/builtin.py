"""Prompts that every machine has: six families of text out of Python's own library, documentation and a seed.

`code`, `tests`: how modules and test modules go on from a definition; `reference`: the language reference; `docstrings`: what
modules say of themselves; `sessions`: examples at the interactive prompt; `arithmetic`: made sums. Text that the built-in corpus
holds out of training comes first, so that as far as it goes a model goes on from what it has not learned.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from coresident.engines.moe.traces.prompts import Prompt
from coresident.errors import UserError, nearest
from coresident.text import arithmetic, pythondocs
from coresident.text.corpus import CorpusSource, Document, documents

FAMILIES = ("code", "tests", "reference", "docstrings", "sessions", "arithmetic")
# Characters of a prompt: some sixty tokens in a vocabulary of thousands. A tracer cuts it to what it was asked for.
LENGTH = 320
_SHORTEST = 160
# Bytes of either corpus that are looked through: all of it would take a minute.
_LOOKED_AT = 2_000_000
_DEFINITION = re.compile(r"^(?:def|class|    def|async def) ", re.MULTILINE)
_SESSION = re.compile(r"^ *>>> .*(?:\n(?!\n).*){3,}", re.MULTILINE)


def prompts(
    each: int = 11, families: Sequence[str] = FAMILIES, say: Callable[[str], None] = lambda _: None
) -> list[Prompt]:
    """`each` prompts of every family, the same on every machine with the same library of Python's.

    Systems that package Python leave parts of it out, such as its test modules: a family with fewer texts gives those that it
    has, and `say` is told. Raises UserError for an unknown family, and where of several families fewer than two have any text.
    """
    made: list[Prompt] = []
    for family in families:
        if family not in FAMILIES:
            raise UserError(f"there are no built-in prompts of family {family!r}", nearest(family, FAMILIES))
        texts = list(itertools.islice(_distinct(_texts(family, each)), each))
        if len(texts) < each:
            say(
                f"{family}: {len(texts)} prompts, not {each}: this machine's Python has no more text for them"
            )
        made += [Prompt(f"{family}-{index:03}", family, text) for index, text in enumerate(texts)]
    found = {one.family for one in made}
    if len(found) < min(2, len(families)):
        raise UserError(
            f"this machine's Python has text for {len(found)} of {len(families)} families of built-in prompts",
            "install its complete standard library, or give prompts of your own (--prompts FILE.jsonl)",
        )
    return made


def _texts(family: str, each: int) -> Iterator[str]:
    if family == "arithmetic":
        return _sums(each)
    if family in ("code", "tests"):
        return _passages("code", _DEFINITION, lambda text: ("unittest" in text) == (family == "tests"))
    if family == "sessions":
        return _passages("prose", _SESSION, lambda _: True)
    topics = set(pythondocs.corpus())
    start = re.compile(r"^(?=[A-Z])", re.MULTILINE)
    return _passages("prose", start, lambda text: (text in topics) == (family == "reference"))


def _passages(corpus: str, start: re.Pattern[str], wanted: Callable[[str], bool]) -> Iterator[str]:
    """One passage a document that is wanted, beginning at one of the places where `start` matches."""
    source = random.Random(f"moe-prompts:{corpus}:{start.pattern}")  # noqa: S311
    for text in _held_out_first(corpus, wanted):
        places = [found.start() for found in start.finditer(text) if len(text) - found.start() >= _SHORTEST]
        if places:
            place = source.choice(places)
            passage = text[place : place + LENGTH]
            yield passage[: max(passage.rfind(" "), passage.rfind("\n"))].rstrip()


def _held_out_first(corpus: str, wanted: Callable[[str], bool]) -> Iterator[str]:
    found = [one for one in _documents(corpus) if wanted(one.text)]
    yield from (one.text for one in sorted(found, key=lambda one: not one.validation))


@cache
def _documents(corpus: str) -> tuple[Document, ...]:
    return tuple(documents(CorpusSource(limit=_LOOKED_AT), corpus))


def _sums(each: int) -> Iterator[str]:
    """Four solved sums and one to solve."""
    for number in range(2 * each):
        worked = arithmetic.pairs(5, seed=1000 + number)
        yield "\n".join(f"{one.prompt}{one.chosen}" for one in worked[:4]) + f"\n{worked[4].prompt}"


def _distinct(texts: Iterator[str]) -> Iterator[str]:
    seen: set[str] = set()
    for text in texts:
        if len(text) >= _SHORTEST // 2 and text not in seen:
            seen.add(text)
            yield text
