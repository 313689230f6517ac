"""In which order a training sees its windows: shuffled by a seed, exactly resumable, and the same however it is read.

Contiguous ranges of 64 MiB are shuffled, and the windows within each, so that a disk is read in long runs while neighbours
part. Each pass shuffles anew. Nothing but (seed, pass, number of windows) decides: neither prefetching nor the size of a batch.
A cursor says how much was taken; training keeps the one of its last finished update.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Annotated, Self

import numpy as np
from pydantic import Field

from coresident.errors import UserError
from coresident.text.blocks import RANGE, Blocks, Integers, Windows
from coresident.text.cache import Split, TokenCache, Tokens
from coresident.workload import Parameters


class Cursor(Parameters):
    """How far a training has read: whole passes, and windows of the pass after them (`model_dump()` is its JSON)."""

    passes: Annotated[int, Field(ge=0)] = 0
    windows: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True)
class Batch(Windows):
    """Windows in the order of training, and the cursor of whoever has used them."""

    cursor: Cursor


@dataclass(frozen=True)
class Order:
    """The windows of a cache's split in the order that `seed` gives."""

    cache: TokenCache
    split: Split
    context: int
    seed: int
    family: str | None = None
    range_bytes: int = RANGE

    @cached_property
    def blocks(self) -> Blocks:
        """The split as windows, in the order of the text. Raises UserError where it has no target."""
        return Blocks(self.cache.tokens(self.split, self.family), self.context, self.range_bytes)

    def __len__(self) -> int:
        """Windows in one pass."""
        return len(self.blocks)

    @property
    def targets(self) -> int:
        """Targets in one pass: all tokens but the first."""
        return self.blocks.targets

    def reader(self, cursor: Cursor | None = None, prefetch: bool = True) -> Reader:
        """Read on from `cursor`. Raises UserError for a cursor that lies beyond a pass."""
        return Reader(self, cursor or Cursor(), prefetch)

    def batches(self, cursor: Cursor | None, windows: int, prefetch: bool = True) -> Iterator[Batch]:
        """Batches without end, `windows` each; the last of a pass is as short as the pass ends."""
        with self.reader(cursor, prefetch) as reader:
            while True:
                yield reader.take(windows)

    def _ranges(self, passes: int) -> Integers:
        return permutation(self.blocks.ranges, f"{self.seed}/{passes}/ranges")

    def _within(self, passes: int, number: int) -> Integers:
        ids = self.blocks.ids(number)
        return ids[permutation(len(ids), f"{self.seed}/{passes}/range/{number}")]


class Reader:
    """Reads an order on from a cursor, with the next range read ahead by a thread where `prefetch`. Close it, or use `with`."""

    def __init__(self, order: Order, cursor: Cursor, prefetch: bool) -> None:
        if cursor.windows >= len(order):
            raise UserError(
                f"the cursor stands at window {cursor.windows} of a pass of {len(order)}",
                "resume with the cache, split and context that the training began with",
            )
        self._order = order
        self._pool = ThreadPoolExecutor(1, "prefetch") if prefetch else None
        self._ahead: Future[_Loaded] | None = None
        self._passes, self._turn, self._used = cursor.passes, 0, cursor.windows
        self._plan = order._ranges(self._passes)
        # A cursor counts windows: the ranges before it are those that it has used up.
        while self._used >= (size := len(order.blocks.ids(int(self._plan[self._turn])))):
            self._used -= size
            self._turn += 1
        self._windows = cursor.windows
        self._loaded: _Loaded | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    @property
    def cursor(self) -> Cursor:
        """Where the next window comes from."""
        return Cursor(passes=self._passes, windows=self._windows)

    def take(self, windows: int) -> Batch:
        """The next `windows` windows; fewer, and at least one, where a pass ends (a batch never has two passes)."""
        if windows < 1:
            raise ValueError(f"a batch of {windows} windows")
        passes = self._passes
        parts: list[tuple[Integers, Tokens]] = []
        while windows and self._passes == passes:
            ids, tokens = self._some(windows)
            parts.append((ids, tokens))
            windows -= len(ids)
        ids = np.concatenate([ids for ids, _ in parts])
        tokens = np.concatenate([tokens for _, tokens in parts])
        return Batch(ids, tokens, self._order.blocks.lengths(ids), self.cursor)

    def _some(self, windows: int) -> tuple[Integers, Tokens]:
        """Up to so many windows of the present range; steps on where that is used up."""
        if self._loaded is None:
            self._loaded = self._range()
        loaded = self._loaded
        ids = loaded.ids[self._used : self._used + windows]
        self._used += len(ids)
        self._windows += len(ids)
        if self._used == len(loaded.ids):
            self._step()
        return ids, loaded.tokens[ids - loaded.first]

    def _step(self) -> None:
        self._loaded, self._used, self._turn = None, 0, self._turn + 1
        if self._turn == len(self._plan):
            self._turn, self._windows, self._passes = 0, 0, self._passes + 1
            self._plan = self._order._ranges(self._passes)

    def _range(self) -> _Loaded:
        """The present range, and with prefetching the next one begun."""
        present = (self._passes, int(self._plan[self._turn]))
        if self._pool is None:
            return _load(self._order, *present)
        ahead, self._ahead = self._ahead, self._pool.submit(_load, self._order, *self._following())
        return ahead.result() if ahead is not None else _load(self._order, *present)

    def _following(self) -> tuple[int, int]:
        if self._turn + 1 < len(self._plan):
            return self._passes, int(self._plan[self._turn + 1])
        return self._passes + 1, int(self._order._ranges(self._passes + 1)[0])


@dataclass(frozen=True)
class _Loaded:
    """A range in memory: `ids` int64[n] shuffled, `tokens` uint16[n, T + 1] in the order of the text from window `first`."""

    first: int
    ids: Integers
    tokens: Tokens


def _load(order: Order, passes: int, number: int) -> _Loaded:
    ids = order._within(passes, number)
    first = int(ids.min())
    return _Loaded(first, ids, order.blocks.load(first, first + len(ids)))


def permutation(count: int, key: str) -> Integers:
    """A permutation of range(count), int64[count], that the key decides.

    Sorts the raw output of Philox, which NumPy promises to keep; what its `Generator` does with it may change (NEP 19).
    """
    bits = np.random.Philox(key=int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "big"))
    return np.argsort(bits.random_raw(count), kind="stable").astype(np.int64)
