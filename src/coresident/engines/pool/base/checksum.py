"""One number that says whether a base is still the base: over what a process sees, not over what a file
holds.

SHA-256, because processors have instructions for it: 1.8 GB/s a core here, as fast as reading the memory from
a disk. It reads every page, so a mapped base is resident afterwards.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from coresident.engines.pool.base.tensors import Layout

if TYPE_CHECKING:
    from torch import Tensor


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) over name, type, shape and bytes of each tensor, in the order of names. They must be
    contiguous.
    """
    return _checksum(
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _bytes(tensor))
        for name, tensor in sorted(tensors.items())
    )


def of_memory(memory: mmap.mmap, plan: Layout) -> str:
    """The same number for the same base in one allocation. Needs no torch."""
    buffer = memoryview(memory)
    return _checksum(
        (slot.name, slot.dtype, slot.stored.shape, buffer[slot.offset : slot.offset + slot.size])
        for slot in sorted(plan.slots, key=lambda slot: slot.name)
    )


def _checksum(parts: Iterable[tuple[str, str, tuple[int, ...], memoryview]]) -> str:
    total = hashlib.sha256()
    for name, dtype, shape, data in parts:
        total.update(f"{name} {dtype} {list(shape)} {len(data)}\n".encode())
        total.update(data)
    return total.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    if not tensor.is_contiguous():
        raise ValueError("a tensor of a base is contiguous")
    size = tensor.numel() * tensor.element_size()
    # bfloat16 has no numpy type, and a read-only tensor no writable view: the address serves both.
    return (
        memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
        if size
        else memoryview(b"")
    )
