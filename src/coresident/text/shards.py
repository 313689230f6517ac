"""Writes a stream of tokens as shards of equal size, each with its checksum, safely on disk once `close` returns."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from coresident.text.cache import WIDTH
from coresident.text.manifest import Shard

SHARD_TOKENS = 1 << 27


class ShardWriter:
    """Appends tokens to `NAME-00000.bin`, `NAME-00001.bin`, ... in a directory; each but the last holds `shard_tokens`.

    Where a shard ends depends on the tokens alone, not on the pieces in which they come.
    """

    def __init__(self, directory: Path, name: str, shard_tokens: int = SHARD_TOKENS) -> None:
        self._directory, self._name = directory, name
        self._limit = shard_tokens * WIDTH
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._size = 0
        self._sum = hashlib.sha256()

    def write(self, tokens: bytes) -> None:
        """Append little-endian uint16 tokens."""
        left = memoryview(tokens)
        while left:
            if self._file is None:
                self._file = (self._directory / self._file_name()).open("wb")
            piece = left[: self._limit - self._size]
            self._file.write(piece)
            self._sum.update(piece)
            self._size += len(piece)
            left = left[len(piece) :]
            if self._size == self._limit:
                self._finish()

    def close(self) -> tuple[Shard, ...]:
        """Finish the last shard and return all of them."""
        if self._file is not None:
            self._finish()
        return tuple(self._shards)

    def abandon(self) -> None:
        """Close what is open; it is not finished."""
        if self._file is not None:
            self._file.close()

    def _file_name(self) -> str:
        return f"{self._name}-{len(self._shards):05}.bin"

    def _finish(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._shards.append(
            Shard(file=self._file_name(), tokens=self._size // WIDTH, sha256=self._sum.hexdigest())
        )
        self._file, self._size, self._sum = None, 0, hashlib.sha256()
