"""Tokenizes documents in processes and gives the results back in the documents' order, whoever was done first.

The reader hands out pieces of about a megabyte; a few are under way at any time, so memory does not grow with the corpus.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from typing import Any

from coresident.errors import MachineError
from coresident.text.corpus import Document
from coresident.text.vocabulary import Encoded, Vocabulary, encode, encoder

PIECE = 1 << 20


@dataclass(frozen=True)
class Piece:
    """Some documents of one family, tokenized: those for training, and those for validation."""

    family: str
    train: Encoded
    validation: Encoded


def tokenized(documents: Iterable[Document], vocabulary: Vocabulary, workers: int) -> Generator[Piece]:
    """Pieces in the order of the documents, the same ones for any number of workers (1: this process itself).

    Raises MachineError where a worker is killed.
    """
    if workers == 1:
        own = encoder(vocabulary)
        for family, some in _pieces(documents):
            yield _tokenize(own, vocabulary.end, family, some)
        return
    # Spawned, not forked: training a tokenizer leaves threads behind that a fork would not survive.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin, (vocabulary,))
    try:
        under_way: deque[Future[Piece]] = deque()
        for piece in _pieces(documents):
            under_way.append(pool.submit(_in_worker, *piece))
            if len(under_way) > 2 * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool:
        raise MachineError(
            "a worker that tokenizes was killed (memory?)", "prepare with fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _pieces(documents: Iterable[Document]) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
    """Documents gathered to about a megabyte of one family; a longer document is a piece of its own size."""
    family, size = "", 0
    gathered: list[tuple[str, bool]] = []
    for document in documents:
        if gathered and (size >= PIECE or document.family != family):
            yield family, gathered
            gathered, size = [], 0
        family = document.family
        gathered.append((document.text, document.validation))
        size += len(document.text)
    if gathered:
        yield family, gathered


def _tokenize(own: Any, end: int, family: str, documents: Sequence[tuple[str, bool]]) -> Piece:
    train = encode(own, end, [text for text, validation in documents if not validation])
    return Piece(family, train, encode(own, end, [text for text, validation in documents if validation]))


_own: tuple[Any, int] | None = None


def _begin(vocabulary: Vocabulary) -> None:
    """In a new worker: it ends with its parent, even a killed one, and Ctrl-C is the parent's to handle."""
    global _own
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _own = encoder(vocabulary), vocabulary.end


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _in_worker(family: str, documents: Sequence[tuple[str, bool]]) -> Piece:
    assert _own is not None
    return _tokenize(*_own, family, documents)
