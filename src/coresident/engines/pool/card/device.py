"""What a pool process does on a card: its context, and one allocation there that holds the whole base.

`cuda:0` is the pool's card, since every process is started with only that one visible. Imports torch: for
processes that use the card.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from coresident import cuda
from coresident.engines.pool.base.tensors import WIDTH, Layout, Slot
from coresident.errors import MachineError

# Each reader has one piece of pinned memory: enough to keep a bus busy, and no staging copy of the base.
PIECE = 16 << 20
READERS = 4
# CUdevice_attribute (cuda.h): whether contexts on this device are clients of the Multi-Process Service.
_MPS_ENABLED = 133


@dataclass(frozen=True)
class Block:
    """A base in one allocation: `memory` is uint8, `plan.size` long; `mapped` if another process owns it."""

    memory: Tensor
    plan: Layout
    mapped: bool

    def tensors(self) -> dict[str, Tensor]:
        """The base's tensors, views of the allocation."""
        return {
            slot.name: self.memory[slot.offset : slot.offset + slot.size]
            .view(getattr(torch, slot.dtype))
            .reshape(slot.stored.shape)
            for slot in self.plan.slots
        }


def start(dtype: str) -> torch.device:
    """Make this process's context on the card, and what its first product needs. Raises MachineError without a card."""
    device = cuda.card()
    small = torch.ones(64, 64, dtype=getattr(torch, dtype), device=device)
    (small @ small).sum().item()
    return device


def under_mps() -> bool | None:
    """Whether this process is a client of MPS, as the driver says it; None where it does not say."""
    value = ctypes.c_int(-1)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuDeviceGetAttribute(ctypes.byref(value), _MPS_ENABLED, 0):
            return None
    except (OSError, AttributeError):
        return None
    return bool(value.value)


def load(plan: Layout, device: torch.device) -> Block:
    """The base, read from its files straight into one allocation on `device`. Raises MachineError for a file that fails."""
    # Padding is zero, so that equal bases are equal bytes.
    memory = torch.zeros(max(plan.size, 1), dtype=torch.uint8, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    pieces = itertools.chain.from_iterable(map(_pieces, plan.slots))
    turn = threading.Lock()

    def following() -> Iterator[_Piece]:
        while True:
            with turn:
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    with ExitStack() as stack:
        files: dict[Path, int] = {}
        for file in {slot.stored.file for slot in plan.slots}:
            files[file] = _open(file)
            stack.callback(os.close, files[file])
        with ThreadPoolExecutor(READERS) as readers:
            for done in [readers.submit(_read, following(), files, memory) for _ in range(READERS)]:
                done.result()
    return Block(memory, plan, mapped=False)


def copied(block: Block) -> Block:
    """The same base in an allocation of this process's own."""
    copy = Block(block.memory.clone(), block.plan, mapped=False)
    torch.cuda.synchronize(block.memory.device)
    return copy


@dataclass(frozen=True)
class _Piece:
    slot: Slot
    first: int
    count: int


def _pieces(slot: Slot) -> Iterator[_Piece]:
    width = WIDTH[slot.stored.dtype]
    total = slot.stored.size // width
    most = PIECE // max(width, WIDTH[slot.dtype])
    for first in range(0, total, most):
        yield _Piece(slot, first, min(most, total - first))


def _read(pieces: Iterator[_Piece], files: Mapping[Path, int], memory: Tensor) -> None:
    """One reader: file to pinned memory to the card, piece by piece."""
    on_card = memory.is_cuda
    buffer = torch.empty(PIECE, dtype=torch.uint8, pin_memory=on_card)
    raw = memoryview(buffer.numpy().data)
    stream = torch.cuda.Stream(memory.device) if on_card else None  # type: ignore[no-untyped-call]
    for piece in pieces:
        slot = piece.slot
        width, held = WIDTH[slot.stored.dtype], WIDTH[slot.dtype]
        size = piece.count * width
        _read_exactly(files[slot.stored.file], raw[:size], slot, slot.stored.offset + piece.first * width)
        at = slot.offset + piece.first * held
        target = memory[at : at + piece.count * held].view(getattr(torch, slot.dtype))
        source = buffer[:size].view(getattr(torch, slot.stored.dtype))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        if stream is not None:
            stream.synchronize()


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise MachineError(f"{file} cannot be read ({error.strerror})", "check the disk it lies on") from None


def _read_exactly(descriptor: int, into: memoryview, slot: Slot, offset: int) -> None:
    got = 0
    while got < len(into):
        try:
            count = os.preadv(descriptor, [into[got:]], offset + got)
        except OSError as error:
            raise MachineError(
                f"{slot.stored.file} cannot be read ({error.strerror})", "check the disk it lies on"
            ) from None
        if not count:
            raise MachineError(
                f"{slot.stored.file} became shorter while {slot.name} was being read",
                "leave the base alone during a run",
            )
        got += count
