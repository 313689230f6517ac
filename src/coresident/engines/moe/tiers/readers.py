"""The ways to read an expert, kept as arms: its scattered tensors, the same in parallel, one record by one read, and one record
by reads in parallel, which a disk that wants many requests gives its full rate to even for a single miss.

A reader says which reads an expert takes (`jobs`); who runs them, and how many at a time, is the host tier's business. What
comes out is the same record whichever way it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, get_args

import torch

from coresident.engines.moe.layout.file import LayoutFile
from coresident.engines.moe.layout.record import RecordFormat
from coresident.engines.moe.models.checkpoint import Checkpoint
from coresident.engines.moe.models.origins import Origin
from coresident.engines.moe.tiers.disk import BLOCK, DiskFile
from coresident.errors import UserError

ReadPath = Literal["scattered", "scattered-parallel", "record", "record-parallel"]
READ_PATHS: tuple[ReadPath, ...] = get_args(ReadPath)
Key = tuple[int, int]
Job = Callable[[], None]


class Reader(Protocol):
    """Brings records into memory. `parallel`: whether its reads may run at the same time."""

    form: RecordFormat
    parallel: bool

    def jobs(self, key: Key, into: memoryview) -> Sequence[Job]:
        """The reads that fill `into` (form.size bytes) with the record of (layer, expert)."""
        ...

    @property
    def files(self) -> list[DiskFile]:
        """What it reads from."""
        ...


@dataclass
class RecordReader:
    """One record by one read of a layout file, or by `pieces` reads of whole blocks."""

    layout: LayoutFile
    direct: bool
    pieces: int = 1
    parallel: bool = True
    form: RecordFormat = field(init=False)
    _file: DiskFile = field(init=False)

    def __post_init__(self) -> None:
        self.form = self.layout.header.form
        self._file = DiskFile(self.layout.path, self.direct)

    @property
    def files(self) -> list[DiskFile]:
        return [self._file]

    def jobs(self, key: Key, into: memoryview) -> list[Job]:
        offset = self.layout.header.offset(*key)
        step = -(-len(into) // self.pieces // BLOCK) * BLOCK
        return [
            partial(self._file.read, offset + at, into[at : at + step]) for at in range(0, len(into), step)
        ]


@dataclass
class ScatteredReader:
    """Gate, up and down from wherever the checkpoint has them: three reads, which tensors' places make unaligned."""

    checkpoint: Checkpoint
    form: RecordFormat
    direct: bool
    parallel: bool
    _files: dict[Path, DiskFile] = field(init=False)

    def __post_init__(self) -> None:
        if self.form.encoding != self.checkpoint.expert_dtype or not self.checkpoint.uniform:
            raise UserError(
                f"{self.checkpoint.path}: its experts are not stored as {self.form.encoding}, so they cannot be read in place",
                "lay it out (coresident moe layout) and read records",
            )
        paths = {piece.file for layer in self.checkpoint.experts for expert in layer for piece in expert}
        self._files = {path: DiskFile(path, self.direct) for path in sorted(paths)}

    @property
    def files(self) -> list[DiskFile]:
        return list(self._files.values())

    def jobs(self, key: Key, into: memoryview) -> list[Job]:
        layer, expert = key
        found: list[Job] = []
        at = 0
        for piece in self.checkpoint.experts[layer][expert]:
            part = into[at : at + piece.size]
            file = self._files[piece.file]
            found.append(partial(file.read, piece.offset, part))
            at += piece.size
        return found


@dataclass
class OriginReader:
    """Encodes records from weights in memory or files, without a layout file: how an arena is filled once."""

    origin: Origin
    form: RecordFormat
    parallel: bool = True

    @property
    def files(self) -> list[DiskFile]:
        return []

    def jobs(self, key: Key, into: memoryview) -> list[Job]:
        def job() -> None:
            self.form.encode(*self.origin.expert(*key), into=torch.frombuffer(into, dtype=torch.uint8))

        return [job]
