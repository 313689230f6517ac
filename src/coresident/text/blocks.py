"""Windows of T + 1 tokens at stride T over a stream of tokens: what a model of context T reads, and what it has to say.

Neighbours share one token (the last target of a window is the first input of the next), so that each token but the very first
is a target exactly once. The last window is as short as the tokens end; it is padded, and its `lengths` says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coresident.errors import UserError
from coresident.text.cache import WIDTH, Stream, Tokens

RANGE = 64 << 20
# What PyTorch's cross-entropy ignores (its `ignore_index`).
IGNORED = -100

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Windows:
    """Some windows: `ids` int64[n] (their place in the stream), `tokens` uint16[n, T + 1], `lengths` int64[n] (targets each)."""

    ids: Integers
    tokens: Tokens
    lengths: Integers

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def valid(self) -> int:
        """How many targets there are, padding left out."""
        return int(self.lengths.sum())

    def inputs(self) -> Integers:
        """int64[n, T]; padding is token 0."""
        return self.tokens[:, :-1].astype(np.int64)

    def targets(self) -> Integers:
        """int64[n, T]: the token that follows each input, or -100 where there is none."""
        targets = self.tokens[:, 1:].astype(np.int64)
        targets[np.arange(targets.shape[1]) >= self.lengths[:, None]] = IGNORED
        return targets


@dataclass(frozen=True)
class Blocks:
    """A stream seen as windows of `context` targets, which lie in contiguous ranges of `range_bytes`."""

    stream: Stream
    context: int
    range_bytes: int = RANGE

    def __post_init__(self) -> None:
        if self.context < 1:
            raise UserError(f"a context of {self.context} tokens has no target", "ask for at least 1")
        if len(self.stream) < 2:
            raise UserError(
                f"there are {len(self.stream)} tokens here, and a target needs a token before it",
                "prepare more text, or for validation a larger source.validation_share",
            )

    def __len__(self) -> int:
        return -(-self.targets // self.context)

    @property
    def targets(self) -> int:
        """All targets of one pass."""
        return len(self.stream) - 1

    @property
    def ranges(self) -> int:
        """How many ranges there are."""
        return -(-len(self) // self._per_range)

    @property
    def _per_range(self) -> int:
        return max(1, self.range_bytes // (WIDTH * self.context))

    def ids(self, number: int) -> Integers:
        """The windows of a range: int64[windows]."""
        first = number * self._per_range
        return np.arange(first, min(first + self._per_range, len(self)), dtype=np.int64)

    def load(self, first: int, last: int) -> Tokens:
        """Windows [first, last) in memory of their own: a view uint16[last - first, T + 1] of about half as many tokens."""
        size = (last - first) * self.context + 1
        tokens = np.zeros(size, np.uint16)
        found = self.stream.read(first * self.context, first * self.context + size)
        tokens[: len(found)] = found
        return np.lib.stride_tricks.as_strided(
            tokens, (last - first, self.context + 1), (WIDTH * self.context, WIDTH), writeable=False
        )

    def lengths(self, ids: Integers) -> Integers:
        """How many targets each of these windows has: T, but for the last window of the stream."""
        return np.minimum(self.context, self.targets - ids * self.context)

    def evenly(self, count: int | None = None) -> Integers:
        """The ids of `count` windows (all where None, or where there are no more) spread evenly over the stream."""
        if count is None or count >= len(self):
            return np.arange(len(self), dtype=np.int64)
        return np.arange(count, dtype=np.int64) * len(self) // count

    def windows(self, ids: Integers) -> Windows:
        """These windows, in the order asked."""
        tokens = [self.load(one, one + 1) for one in ids.tolist()]
        return Windows(ids, np.concatenate([self.load(0, 0), *tokens]), self.lengths(ids))
