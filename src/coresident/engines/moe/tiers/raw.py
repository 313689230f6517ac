"""What a disk gives with nothing else to do, read between a decoder's steps: a disk that others share may give half of it a
minute later, so a rate that is measured afterwards is no measure of what came before. And it reads into the memory that fetches
read into: how its pages happen to lie makes a tenth of the rate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

from coresident.engines.moe.layout.file import LayoutFile
from coresident.engines.moe.tiers.disk import DiskFile
from coresident.engines.moe.tiers.host import READERS

# Of one decoding, so that a slow disk does not double what it takes.
AT_MOST = 2 << 30


@dataclass
class RawReads:
    """Whole records of `layout` past the page cache, through a file of its own, by as many threads as a fetch has.

    `buffers`, of a record each, are overwritten. `follow` reads about as much as a step has fetched, and of `steps` steps
    `AT_MOST` bytes together; `nbytes` and `seconds` add up. Raises MachineError where the filesystem has no O_DIRECT.
    """

    layout: LayoutFile
    buffers: Sequence[memoryview]
    steps: int
    nbytes: int = 0
    seconds: float = 0.0
    _file: DiskFile = field(init=False)
    _free: SimpleQueue[memoryview] = field(init=False, default_factory=SimpleQueue)
    _pool: ThreadPoolExecutor = field(init=False)
    _owed: int = field(init=False, default=0)
    _next: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._file = DiskFile(self.layout.path, direct=True)
        for buffer in self.buffers:
            self._free.put(buffer)
        self._pool = ThreadPoolExecutor(READERS)

    def follow(self, fetched: int) -> None:
        """A step has read `fetched` bytes: read as many, but never fewer records than there are threads. What is read too
        much is taken off the next times.
        """
        self._owed += min(fetched, AT_MOST // self.steps)
        if self._owed > 0:
            size = self.layout.header.form.size
            self._read(max(READERS, -(-self._owed // size)))

    @property
    def rate(self) -> float | None:
        """Bytes a second over all reads; None where there were none."""
        return self.nbytes / self.seconds if self.nbytes else None

    def close(self) -> None:
        """Give threads and the file back."""
        self._pool.shutdown()
        self._file.close()

    def _read(self, records: int) -> None:
        header = self.layout.header
        count = header.layers * header.experts
        places = [number * _stride(count) % count for number in range(self._next, self._next + records)]
        start = time.monotonic()
        list(self._pool.map(self._one, places))
        self.seconds += time.monotonic() - start
        self._next += records
        self.nbytes += records * header.form.size
        self._owed -= records * header.form.size

    def _one(self, place: int) -> None:
        header, buffer = self.layout.header, self._free.get()
        try:
            self._file.read(header.start + place * header.form.size, buffer)
        finally:
            self._free.put(buffer)


def _stride(count: int) -> int:
    """Steps through `count` places that reach each once and lie far apart: near the golden section, and coprime."""
    return next(step for step in range(int(0.618 * count), 2 * count + 2) if math.gcd(step, count) == 1)
