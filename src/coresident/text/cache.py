"""A token cache: a directory of uint16 shards that a manifest describes, published whole or not at all.

`prepare` makes one; training reads it through memory maps. Opening compares what costs nothing (the manifest's own hash,
every file's size, the tokenizer's checksums); `verify` reads all and compares every checksum. A token that the vocabulary does
not have is refused whenever it is read: in a table on a card it would end the process.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from coresident.errors import UserError, nearest
from coresident.text import manifest as manifests
from coresident.text.manifest import FILE, Manifest, Shard

Split = Literal["train", "validation"]
Tokens = npt.NDArray[np.uint16]
# On disk always little-endian, whatever the machine.
WIDTH = 2
LITTLE = np.dtype("<u2")
REMEDY = "prepare it again, or copy it again whole"


@dataclass(frozen=True)
class Stream:
    """The tokens of some shards of the cache `path`, one after the other, as one sequence. `maps` are memory maps [tokens of
    the shard], and every token is below `vocabulary`; `files` are the shards with what they were when they were mapped.
    """

    maps: tuple[Tokens, ...]
    vocabulary: int
    path: Path
    files: tuple[tuple[Path, os.stat_result], ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each shard starts, and where the last one ends."""
        starts = [0]
        for tokens in self.maps:
            starts.append(starts[-1] + len(tokens))
        return tuple(starts)

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) in memory of their own: uint16[stop - start], fewer at the end.

        Raises UserError where one of them is none of the vocabulary, or where a shard was written to meanwhile.
        """
        parts = []
        for first, tokens, (file, before) in zip(self.starts, self.maps, self.files, strict=False):
            if first < stop and first + len(tokens) > start:
                _check_unchanged(file, before)
                parts.append(tokens[max(0, start - first) : max(0, stop - first)])
        found = np.concatenate([np.empty(0, np.uint16), *parts]).astype(np.uint16, copy=False)
        if found.size and (largest := int(found.max())) >= self.vocabulary:
            raise UserError(
                f"{self.path} holds the token {largest}, and its vocabulary ends at {self.vocabulary - 1}: a shard was changed",
                REMEDY,
            )
        return found

    def chunks(self, size: int = 1 << 24) -> Iterator[Tokens]:
        """All tokens in order, `size` at a time."""
        for start in range(0, len(self), size):
            yield self.read(start, start + size)


@dataclass(frozen=True)
class TokenCache:
    """An open token cache."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path) -> TokenCache:
        """Open a cache after comparing its manifest's hash, the size of each shard and the checksums of the tokenizer.

        Raises UserError where there is none, where it is unfinished, or where something differs.
        """
        found = manifests.read(path)
        cache = cls(path, found)
        for name, size in cache._sizes():
            file = path / name
            if not file.is_file():
                raise UserError(f"{file} is missing from the token cache", REMEDY)
            if size is not None and file.stat().st_size != size:
                raise UserError(f"{file} has {file.stat().st_size} bytes where {FILE} says {size}", REMEDY)
        cache._compare(
            (name, said) for name, said in cache._checksums() if name.startswith(manifests.TOKENIZER)
        )
        return cache

    def verify(self) -> None:
        """Read every file and compare its checksum. Raises UserError naming the first that differs."""
        self._compare(self._checksums())

    def _compare(self, checksums: Iterable[tuple[str, str]]) -> None:
        with ThreadPoolExecutor() as pool:
            sums = [(name, said, pool.submit(_sha256, self.path / name)) for name, said in checksums]
            for name, said, found in sums:
                if found.result() != said:
                    raise UserError(f"{self.path / name} has another checksum than {FILE} says", REMEDY)

    @property
    def identity(self) -> str:
        """SHA-256 (hex) of the manifest, and so of every token in the cache and of its tokenizer."""
        return self.manifest.identity

    @property
    def size(self) -> int:
        """Bytes of all tokens: what `verify` reads."""
        return WIDTH * sum(stream.tokens for stream in self.manifest.streams)

    @property
    def vocabulary(self) -> int:
        """One more than the largest token that the tokenizer can give."""
        return self.manifest.vocabulary

    @property
    def end(self) -> int:
        """The token that ends each document."""
        return self.manifest.end

    @property
    def families(self) -> tuple[str, ...]:
        """The labels that each split is divided by, in the order of their tokens."""
        return self.manifest.families

    @property
    def tokenizer_dir(self) -> Path:
        """A directory that transformers loads the tokenizer from."""
        return self.path / manifests.TOKENIZER

    def tokens(self, split: Split, family: str | None = None) -> Stream:
        """A split's tokens, of one family or of one family after the other."""
        shards = self._shards(split, family)
        files = [self.path / shard.file for shard in shards]
        return Stream(
            tuple(
                np.memmap(file, LITTLE, "r", shape=(shard.tokens,))
                for file, shard in zip(files, shards, strict=True)
            ),
            self.vocabulary,
            self.path,
            tuple((file, file.stat()) for file in files),
        )

    def _shards(self, split: Split, family: str | None) -> list[Shard]:
        if family is not None and family not in self.families:
            raise UserError(f"{self.path} has no family {family!r}", nearest(family, self.families))
        return [
            shard
            for one in self.manifest.streams
            if one.split == split and family in (None, one.family)
            for shard in one.shards
        ]

    def _sizes(self) -> Iterator[tuple[str, int | None]]:
        for one in self.manifest.streams:
            for shard in one.shards:
                yield shard.file, shard.tokens * WIDTH
        for name in self.manifest.tokenizer:
            yield f"{manifests.TOKENIZER}/{name}", None

    def _checksums(self) -> Iterator[tuple[str, str]]:
        for one in self.manifest.streams:
            for shard in one.shards:
                yield shard.file, shard.sha256
        for name, digest in self.manifest.tokenizer.items():
            yield f"{manifests.TOKENIZER}/{name}", digest


def _check_unchanged(file: Path, before: os.stat_result) -> None:
    """A file that is written to shows through its map, and one that was cut ends the process at the first touch. One that was
    replaced by its name does neither: the old one stays mapped.
    """
    try:
        now = file.stat()
    except OSError:
        return
    same = (now.st_dev, now.st_ino) == (before.st_dev, before.st_ino)
    if same and (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise UserError(f"{file} was written to while it is read", REMEDY)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
