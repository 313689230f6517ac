"""Records out of host memory: each the right one, its buffer never filled again while it is copied from."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coresident.engines.moe.layout.record import RecordFormat
from coresident.engines.moe.layout.writer import write
from coresident.engines.moe.models.architecture import named
from coresident.engines.moe.models.checkpoint import open_checkpoint
from coresident.engines.moe.models.origins import Drawn, Files
from coresident.engines.moe.tiers.disk import DiskFile
from coresident.engines.moe.tiers.host import arena, staged
from coresident.engines.moe.tiers.memory import allocate
from coresident.engines.moe.tiers.readers import Job, Key, OriginReader, Reader, RecordReader, ScatteredReader
from coresident.errors import MachineError, UserError

FORM = RecordFormat(64, 96, "F32")
KEYS = [(layer, expert) for layer in range(3) for expert in range(8)]


@pytest.fixture
def origin(saved: Callable[[str], Path]) -> Files:
    """The tiny OLMoE."""
    return Files(open_checkpoint(saved("olmoe")))


@pytest.fixture
def readers(origin: Files, tmp_path: Path) -> list[Reader]:
    """All ways to read, past the page cache where there is a file."""
    layout = write(origin, FORM, tmp_path / "experts")
    return [
        OriginReader(origin, FORM),
        RecordReader(layout, direct=True),
        RecordReader(layout, direct=True, pieces=5),
        ScatteredReader(origin.checkpoint, FORM, direct=True, parallel=False),
        ScatteredReader(origin.checkpoint, FORM, direct=True, parallel=True),
        ScatteredReader(origin.checkpoint, FORM, direct=False, parallel=True),
    ]


def test_all_ways_to_read_give_the_same_record(origin: Files, readers: list[Reader]) -> None:
    memory = allocate(1, FORM.size, pin=False)
    for key in KEYS:
        wanted = FORM.encode(*origin.expert(*key))
        for reader in readers:
            memory.records.zero_()
            for job in reader.jobs(key, memory.buffers[0]):
                job()
            assert torch.equal(memory.records[0], wanted), type(reader)
    assert [len(reader.jobs((0, 0), memory.buffers[0])) for reader in readers] == [1, 1, 5, 3, 3, 3]


def test_host_memory_has_exactly_the_size_asked_for() -> None:
    memory = allocate(9, FORM.size, pin=False)
    assert len(memory._mapping) == 9 * FORM.size
    assert memory.records.data_ptr() % 4096 == 0
    assert memory.records.shape == (9, FORM.size)


def test_more_host_memory_than_there_is_is_refused() -> None:
    with pytest.raises(MachineError, match="host memory for experts cannot be had"):
        allocate(1 << 40, 1 << 22, pin=False)


def test_memory_that_cannot_be_pinned_is_no_other_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    with pytest.raises(MachineError, match=r"cannot be pinned \(CUDA error 2") as refused:
        allocate(4, 4096, pin=True)
    assert "ulimit -l" in refused.value.remedy


def test_an_arena_holds_every_record(origin: Files, readers: list[Reader]) -> None:
    held = arena(readers[1], 3, 8, pin=False)
    for place, record in held.fetch(KEYS):
        assert torch.equal(record, FORM.encode(*origin.expert(*KEYS[place])))
    assert held.served.from_memory == len(KEYS)
    assert held.served.read == 0


@pytest.mark.parametrize("encoding", ["BF16", "Q4"])
def test_drawn_weights_are_the_same_bits_whoever_draws_them(encoding: Any) -> None:
    """By many threads into an arena, or one after another: digests are compared between cells."""
    shape = named("tiny")
    form = RecordFormat(shape.width, shape.expert_width, encoding)
    held = arena(OriginReader(Drawn(shape, 5), form), 3, 8, pin=False)
    again = Drawn(shape, 5)
    for place, record in reversed(list(held.fetch(KEYS))):
        assert torch.equal(record, form.encode(*again.expert(*KEYS[place])))
    assert not torch.equal(held.memory.records[0], held.memory.records[1])
    assert not torch.equal(Drawn(shape, 6).expert(0, 0)[0], again.expert(0, 0)[0])
    # What is always resident is nobody's window: it may be written to, and lies where products want it.
    again.dense("model.layers.0.mlp.gate.weight").zero_()
    assert again.dense("model.layers.0.mlp.gate.weight").any()


def test_an_arena_leaves_the_number_of_threads(origin: Files) -> None:
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    inside: list[int] = []

    class Asking(OriginReader):
        def jobs(self, key: Key, into: memoryview) -> list[Job]:
            inside.append(torch.get_num_threads())
            return super().jobs(key, into)

    try:
        arena(Asking(origin, FORM), 3, 8, pin=False)
        assert set(inside) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(usual)


def test_an_arena_is_not_filled_from_a_damaged_file(origin: Files, tmp_path: Path) -> None:
    layout = write(origin, FORM, tmp_path / "experts")
    with layout.path.open("r+b") as file:
        file.seek(layout.header.offset(1, 1))
        file.write(b"\0\0\0\0")
    with pytest.raises(UserError, match="layer 1, expert 1 has a bad checksum"):
        arena(RecordReader(layout, direct=False), 3, 8, pin=False)
    checked = staged(RecordReader(layout, direct=True), 4, keep=False, pin=False, verify=True)
    assert [place for place, _ in taken(checked, [(0, 1)])] == [0]
    with pytest.raises(UserError, match="layer 1, expert 1 has a bad checksum"):
        taken(checked, [(1, 1)])


def taken(host: Any, keys: Sequence[Key]) -> list[tuple[int, torch.Tensor]]:
    """Fetch, copy each record at once, and say so."""
    found = []
    for place, record in host.fetch(keys):
        found.append((place, record.clone()))
        host.copied(keys[place], None)
    return found


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("buffers", [2, 5, 24])
def test_few_buffers_serve_many_records(
    keep: bool, buffers: int, origin: Files, readers: list[Reader]
) -> None:
    for reader in readers[1:]:
        host = staged(reader, buffers, keep, pin=False, verify=False)
        for _ in range(2):
            found = taken(host, KEYS)
            assert sorted(place for place, _ in found) == list(range(len(KEYS)))
            for place, record in found:
                assert torch.equal(record, FORM.encode(*origin.expert(*KEYS[place])))
        kept = keep and buffers == len(KEYS)
        assert host.served.read == len(KEYS) * (1 if kept else 2)
        assert host.served.bytes_read == host.served.read * FORM.payload
        host.close()


def test_a_host_cache_gives_up_what_was_used_longest_ago(readers: list[Reader]) -> None:
    host = staged(readers[1], 2, keep=True, pin=False, verify=False)
    for key in ((0, 0), (0, 1), (0, 0), (0, 2), (0, 0)):
        taken(host, [key])
    assert (host.served.read, host.served.from_memory) == (3, 2)


class Copying:
    """A copy to a device that takes a while."""

    def __init__(self) -> None:
        self.over = threading.Event()
        threading.Timer(0.1, self.over.set).start()

    def synchronize(self) -> None:
        self.over.wait()


def test_a_buffer_is_not_filled_before_the_copy_out_of_it_is_over(origin: Files, tmp_path: Path) -> None:
    reading: list[float] = []

    class Watched(OriginReader):
        def jobs(self, key: Key, into: memoryview) -> list[Job]:
            job = super().jobs(key, into)[0]

            def watched() -> None:
                reading.append(time.monotonic())
                job()

            return [watched]

    host = staged(Watched(origin, FORM), 2, keep=False, pin=False, verify=False)
    copies = {}
    for place, _ in host.fetch(KEYS[:2]):
        copies[place] = Copying()
        host.copied(KEYS[place], copies[place])
    before = time.monotonic()
    for place, _ in host.fetch(KEYS[2:4]):
        host.copied(KEYS[2 + place], None)
    assert all(copy.over.is_set() for copy in copies.values())
    assert reading[2] - before > 0.05


def test_scattered_reads_need_the_dtype_that_is_stored(origin: Files) -> None:
    with pytest.raises(UserError, match=r"are not stored as BF16.*coresident moe layout"):
        ScatteredReader(origin.checkpoint, RecordFormat(64, 96, "BF16"), direct=False, parallel=False)


def test_a_file_cut_while_it_is_read_from_is_an_error(readers: list[Reader]) -> None:
    reader = readers[1]
    assert isinstance(reader, RecordReader)
    os_file: DiskFile = reader.files[0]
    with os_file.path.open("r+b") as file:
        file.truncate(reader.layout.header.offset(2, 7))
    host = staged(reader, 2, keep=False, pin=False, verify=False)
    with pytest.raises(MachineError, match="ended at byte"):
        taken(host, [(2, 7)])
