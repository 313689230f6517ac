"""Two ways for a process to hold a base of its own: a private copy, or the file mapped read-only.

Neither copies twice: a private base is read straight into the one allocation its tensors point into, and a
mapped base is the page cache itself. Mapping is shared and read-only on purpose: safetensors maps privately,
where a write succeeds silently in one process only; here it faults.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coresident.engines.pool.base.base import BaseDir
from coresident.engines.pool.base.tensors import WIDTH, Layout, Slot, converted
from coresident.errors import MachineError, UserError

if TYPE_CHECKING:
    from torch import Tensor


def private(base: BaseDir, dtype: str) -> dict[str, Tensor]:
    """Every tensor, floating ones as `dtype`, in anonymous memory of this process alone; each 64-byte
    aligned.

    Raises `MemoryError` where the memory cannot be had, `MachineError` where the file cannot be read.
    """
    plan = base.layout(dtype)
    try:
        memory = mmap.mmap(-1, max(plan.size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"a private base of {plan.size} bytes cannot be allocated ({error.strerror})"
        ) from None
    fill(memoryview(memory), plan)
    return view(memory, plan)


def mapped(base: BaseDir, dtype: str) -> dict[str, Tensor]:
    """Every tensor in the file's own pages, mapped shared and read-only: a write to one faults.

    Raises `UserError` where the file's type is not `dtype`, since a mapping cannot convert.
    """
    check_mappable(base, dtype)
    maps: dict[Path, mmap.mmap] = {}
    for file in {stored.file for stored in base.tensors}:
        with file.open("rb") as stream:
            maps[file] = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    return {
        stored.name: _tensor(maps[stored.file], stored.dtype, stored.shape, stored.offset)
        for stored in base.tensors
    }


def check_mappable(base: BaseDir, dtype: str) -> None:
    """Raise `UserError` where the base cannot be used as it lies in its files."""
    for stored in base.tensors:
        if converted(stored) and stored.dtype != dtype:
            raise UserError(
                f"sharing: mapped cannot convert {stored.file} ({stored.name}: {stored.dtype}) to {dtype}",
                f"set dtype: {stored.dtype} where the installed type allows it, or use sharing: none or fork",
            )
        if stored.offset % WIDTH[stored.dtype]:
            raise UserError(
                f"sharing: mapped needs aligned tensors; {stored.file} has {stored.name} at {stored.offset}",
                "save the checkpoint again with safetensors >= 0.3, or use sharing: none or fork",
            )


def fill(memory: memoryview, plan: Layout) -> None:
    """Read every tensor of `plan` from its file into `memory`, converting only where the types differ.

    Needs no torch unless something is converted. Files are read once, front to back.
    """
    by_file: dict[Path, list[Slot]] = {}
    for slot in plan.slots:
        by_file.setdefault(slot.stored.file, []).append(slot)
    for file, slots in by_file.items():
        try:
            with file.open("rb", buffering=0) as stream:
                for slot in sorted(slots, key=lambda slot: slot.stored.offset):
                    stream.seek(slot.stored.offset)
                    _read_one(stream, slot, memory[slot.offset : slot.offset + slot.size])
        except OSError as error:
            raise MachineError(
                f"{file} cannot be read ({error.strerror})", "check the disk it lies on"
            ) from None


def _read_one(stream: Any, slot: Slot, into: memoryview) -> None:
    if slot.dtype == slot.stored.dtype:
        _read_whole(stream, slot, into)
        return
    import torch

    raw = bytearray(slot.stored.size)
    _read_whole(stream, slot, memoryview(raw))
    source = torch.frombuffer(raw, dtype=getattr(torch, slot.stored.dtype))
    torch.frombuffer(into, dtype=getattr(torch, slot.dtype)).copy_(source)


def _read_whole(stream: Any, slot: Slot, into: memoryview) -> None:
    got = 0
    while got < len(into):
        # Linux reads at most 2 GiB a call.
        count = stream.readinto(into[got : got + (1 << 30)])
        if not count:
            raise MachineError(
                f"{slot.stored.file} became shorter while {slot.name} was being read",
                "leave the base alone during a run",
            )
        got += count


def view(memory: mmap.mmap, plan: Layout) -> dict[str, Tensor]:
    """The tensors of a filled allocation, without copying; they keep `memory` alive."""
    return {slot.name: _tensor(memory, slot.dtype, slot.stored.shape, slot.offset) for slot in plan.slots}


def _tensor(memory: mmap.mmap, dtype: str, shape: tuple[int, ...], offset: int) -> Tensor:
    import torch

    count = 1
    for extent in shape:
        count *= extent
    kind = getattr(torch, dtype)
    if count == 0:
        return torch.empty(shape, dtype=kind)
    with warnings.catch_warnings():
        # That it cannot be written is the point: the fault names whoever tries.
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        return torch.frombuffer(memory, dtype=kind, count=count, offset=offset).reshape(shape)


def ranges(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """The addresses `[start, end)` that each tensor's bytes occupy in this process, whatever holds them."""
    return {
        name: (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
        for name, tensor in tensors.items()
        if tensor.numel()
    }


PAGE = os.sysconf("SC_PAGE_SIZE")
