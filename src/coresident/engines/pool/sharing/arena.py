"""One memory area that holds the base for every learner: filled once, sealed, then mapped read-only by all.

The area is a memfd. The golden process fills it and seals it: from then on its size is fixed and no process,
the golden one included, can get a writable mapping of it, so that a learner's write is a fault in that
learner alone. Where memfds are forbidden an unlinked file in /dev/shm stands in; learners then hold a
descriptor that was opened for reading only.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
from typing import TYPE_CHECKING

from coresident import available
from coresident.engines.pool.base.loading import fill, view
from coresident.engines.pool.base.tensors import Layout
from coresident.errors import MachineError

if TYPE_CHECKING:
    from torch import Tensor

# Linux 5.1; Python names it from 3.13 on.
F_SEAL_FUTURE_WRITE = 0x0010


def create(size: int) -> int:
    """A descriptor of an empty area of `size` bytes, its memory taken now.

    Raises `MemoryError` where it cannot be had: a write into an area whose pages are missing would kill the
    writer.
    """
    # Asked first: a kernel that is out of memory does not refuse, it kills, and not always who asked.
    free = available.memory()
    if size > free:
        raise MemoryError(f"an arena of {size} bytes cannot be allocated: {free} bytes of memory are free")
    try:
        descriptor = os.memfd_create("coresident-base", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        descriptor, path = tempfile.mkstemp(prefix="coresident-base-", dir="/dev/shm")
        os.unlink(path)  # noqa: PTH108
    try:
        os.posix_fallocate(descriptor, 0, max(size, 1))
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise MemoryError(f"an arena of {size} bytes cannot be allocated ({error.strerror})") from None
        raise
    return descriptor


def write(descriptor: int, plan: Layout) -> None:
    """Fill the area with the base, from its files, and seal it. No writable mapping of it is left."""
    with mmap.mmap(descriptor, max(plan.size, 1), flags=mmap.MAP_SHARED) as memory:
        buffer = memoryview(memory)
        fill(buffer, plan)
        buffer.release()
    seal(descriptor)


def seal(descriptor: int) -> bool:
    """Fix the area's size and forbid writing it for good; False where this kind of memory has no seals."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError:
        return False
    return True


def reading(descriptor: int) -> int:
    """A second descriptor of the same memory that was opened for reading only."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def mapping(descriptor: int, plan: Layout) -> mmap.mmap:
    """The area in this process's memory, shared and read-only."""
    held = os.fstat(descriptor).st_size
    if held < plan.size:
        raise MachineError(
            f"the arena holds {held} bytes where the base has {plan.size}",
            "leave the base alone during a run",
        )
    return mmap.mmap(descriptor, max(plan.size, 1), flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)


def copied(descriptor: int, plan: Layout) -> dict[str, Tensor]:
    """The same tensors in anonymous memory of this process alone. Raises `MemoryError` where it cannot be had."""
    try:
        memory = mmap.mmap(-1, max(plan.size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"a copy of {plan.size} bytes cannot be allocated ({error.strerror})") from None
    with mapping(descriptor, plan) as source:
        memory.write(memoryview(source)[: plan.size])
    return view(memory, plan)


def attach(descriptor: int, plan: Layout) -> dict[str, Tensor]:
    """The base's tensors in the area, shared and read-only; they keep the mapping alive."""
    return view(mapping(descriptor, plan), plan)
