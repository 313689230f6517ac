"""Where a missing expert comes from in the host: an arena that holds all, or buffers that a reader fills from disk.

Both hand out records as tensors that the device copies from. A buffer is not filled again before the copy out of it is over.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from coresident.engines.moe.layout.file import bad_record
from coresident.engines.moe.tiers.memory import HostMemory, allocate
from coresident.engines.moe.tiers.readers import Key, Reader, RecordReader

READERS = 8


class Copied(Protocol):
    """What says that a copy is over: a CUDA event, or nothing on a CPU."""

    def synchronize(self) -> None: ...


class Host(Protocol):
    """The tier below the device's slots."""

    memory: HostMemory
    served: Served

    def fetch(self, keys: Sequence[Key]) -> Iterator[tuple[int, Tensor]]:
        """Each key's place in `keys` and its record, as they become ready; valid until `copied` was called for it."""
        ...

    def copied(self, key: Key, over: Copied | None) -> None:
        """A copy out of the record was issued; it is over when `over` is."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


@dataclass
class Served:
    """What really served: records from memory; records and bytes read, in the time from each fetch's first read to its last."""

    from_memory: int = 0
    read: int = 0
    bytes_read: int = 0
    read_seconds: float = 0.0


@dataclass
class Arena:
    """All records in host memory, brought there once."""

    memory: HostMemory
    keys: dict[Key, int]
    served: Served = field(default_factory=Served)
    _records: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._records = list(self.memory.records)

    def fetch(self, keys: Sequence[Key]) -> Iterator[tuple[int, Tensor]]:
        for place, key in enumerate(keys):
            self.served.from_memory += 1
            yield place, self._records[self.keys[key]]

    def copied(self, key: Key, over: Copied | None) -> None:
        pass

    def close(self) -> None:
        self.memory.release()


def arena(
    reader: Reader,
    layers: int,
    experts: int,
    pin: bool,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Arena:
    """Read every record into memory, with their checksums compared where they have any."""
    keys = [(layer, expert) for layer in range(layers) for expert in range(experts)]
    # Pinned once it is full: the threads that fill it bring its pages, which the driver alone would do one after another.
    memory = allocate(len(keys), reader.form.size, pin=False)
    verify = verifier(reader)
    threads = min(2 * READERS, len(os.sched_getaffinity(0))) if reader.parallel else 1
    with _one_each(), ThreadPoolExecutor(threads) as pool:

        def bring(number: int) -> None:
            for job in reader.jobs(keys[number], memory.buffers[number]):
                job()
            verify(keys[number], memory.buffers[number])

        try:
            for done, _ in enumerate(pool.map(bring, range(len(keys)))):
                progress(done + 1, len(keys))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if pin:
        memory.pin()
    return Arena(memory, {key: number for number, key in enumerate(keys)})


@contextmanager
def _one_each() -> Iterator[None]:
    """Threads that begin here compute with one core each, instead of each with all of them."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


@dataclass
class Staged:
    """`buffers` records of host memory that reads go into.

    With `keep`, a record stays until its buffer is the one that was used longest ago: a cache in host memory. Without, every
    fetch is a read, which is what a cold disk costs.
    """

    reader: Reader
    memory: HostMemory
    keep: bool
    verify: Callable[[Key, memoryview], None]
    served: Served = field(default_factory=Served)
    _pool: ThreadPoolExecutor = field(init=False)
    _held: OrderedDict[Key, int] = field(init=False, default_factory=OrderedDict)
    _free: list[int] = field(init=False)
    _over: dict[int, Copied] = field(init=False, default_factory=dict)
    # Being read, or handed out and not yet copied.
    _busy: set[Key] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self._free = list(range(len(self.memory.buffers)))
        self._pool = ThreadPoolExecutor(READERS if self.reader.parallel else 1)

    def fetch(self, keys: Sequence[Key]) -> Iterator[tuple[int, Tensor]]:
        waiting: dict[Future[None], int] = {}
        left: dict[int, int] = {}
        todo = list(enumerate(keys))
        begun: float | None = None
        while todo or waiting:
            while todo and (buffer := self._buffer(todo[0][1])) is not None:
                place, key = todo.pop(0)
                self._busy.add(key)
                if buffer < 0:
                    self.served.from_memory += 1
                    yield place, self.memory.records[self._held[key]]
                    continue
                jobs = self.reader.jobs(key, self.memory.buffers[buffer])
                left[place] = len(jobs)
                begun = time.monotonic() if begun is None else begun
                waiting |= {self._pool.submit(job): place for job in jobs}
            if not waiting:
                continue
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            if len(done) == len(waiting) and not todo and begun is not None:
                self.served.read_seconds += time.monotonic() - begun
            for one in done:
                place = waiting.pop(one)
                one.result()
                left[place] -= 1
                if not left[place]:
                    buffer = self._held[keys[place]]
                    self.verify(keys[place], self.memory.buffers[buffer])
                    self.served.read += 1
                    self.served.bytes_read += self.reader.form.payload
                    yield place, self.memory.records[buffer]

    def copied(self, key: Key, over: Copied | None) -> None:
        buffer = self._held[key]
        self._busy.discard(key)
        if over is not None:
            self._over[buffer] = over
        if not self.keep:
            del self._held[key]
            self._free.insert(0, buffer)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for over in self._over.values():
            over.synchronize()
        self.memory.release()

    def check(self) -> None:
        """Compare what is kept, and from now on every record that is read, with its checksum. Raises UserError."""
        self.verify = verifier(self.reader)
        for key, buffer in self._held.items():
            self.verify(key, self.memory.buffers[buffer])

    def _buffer(self, key: Key) -> int | None:
        """A buffer to read `key` into; -1 if its record is here already; None if all are being read or copied from."""
        if key in self._held:
            self._held.move_to_end(key)
            return -1
        if not self._free:
            victim = next((one for one in self._held if one not in self._busy), None) if self.keep else None
            if victim is None:
                return None
            self._free.append(self._held.pop(victim))
        buffer = self._free.pop()
        # The copy out of it may still be under way.
        over = self._over.pop(buffer, None)
        if over is not None:
            over.synchronize()
        self._held[key] = buffer
        return buffer


def staged(reader: Reader, buffers: int, keep: bool, pin: bool, verify: bool) -> Staged:
    """Buffers for `buffers` records; `verify` compares each read record's checksum."""
    return Staged(
        reader,
        allocate(buffers, reader.form.size, pin),
        keep,
        verifier(reader) if verify else lambda *_: None,
    )


def verifier(reader: Reader) -> Callable[[Key, memoryview], None]:
    """Compares a record with its checksum, where the reader's records have one. Raises UserError, naming the record."""
    if not isinstance(reader, RecordReader):
        return lambda *_: None
    digests, experts, path = reader.layout.digests(), reader.layout.header.experts, reader.layout.path

    def verify(key: Key, record: memoryview) -> None:
        if hashlib.sha256(record).digest() != digests[key[0] * experts + key[1]]:
            raise bad_record(path, *key)

    return verify
