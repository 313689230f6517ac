"""Host memory that a card copies from: page-aligned, of exactly the size asked for, pinned and read back as such.

In huge pages where the kernel gives them: a card that reads 4 KiB here and 4 KiB there waits for addresses.

PyTorch's own pinned allocator rounds up to a power of two, which for 9 GiB is 16. Where pages cannot be pinned that is an
error: pageable memory is another tier, several times slower.
"""

from __future__ import annotations

import mmap
import resource
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from coresident import available
from coresident.engines.moe.tiers import huge
from coresident.errors import MachineError


@dataclass
class HostMemory:
    """`records` [count, size] of uint8; `buffers` are the same as memoryviews; `pinned` as the driver says it."""

    records: Tensor
    buffers: list[memoryview]
    _mapping: mmap.mmap
    pinned: bool = False

    def pin(self) -> None:
        """Make the driver hold its pages. Raises MachineError where it does not."""
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        result = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)  # type: ignore[no-untyped-call]
        self.pinned = int(result) == 0 and whole.is_pinned()
        if not self.pinned:
            limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            told = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
            raise MachineError(
                f"{whole.numel():,} bytes of host memory cannot be pinned (CUDA error {int(result)}; locked memory: {told})",
                "raise `ulimit -l` or the container's memory, give a smaller --host-memory, or tier: disk",
            )

    @property
    def huge(self) -> float | None:
        """The share of it in huge pages; None where the kernel does not say."""
        return huge.share(self.records.data_ptr(), self.records.numel())

    def release(self) -> None:
        """Unpin. The memory goes when nothing refers to it any more."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.records.data_ptr())  # type: ignore[no-untyped-call]
            self.pinned = False


def allocate(count: int, size: int, pin: bool) -> HostMemory:
    """Room for `count` records of `size` bytes (whole pages). Raises MachineError where there is none or it cannot be pinned."""
    total = max(count, 1) * size
    free = available.memory()
    if total > free:
        # The kernel would grant it, and end the process when it is written to.
        raise _refused(total, f"{free:,} are available")
    try:
        # Private: the kernel gives shared memory no huge pages unless its administrator said so.
        mapping = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise _refused(total, str(error)) from None
    if hasattr(mmap, "MADV_HUGEPAGE") and total >= 1 << 21:
        # A kernel built without huge pages knows no such advice; `huge` says what came of it.
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    records = whole[: count * size].view(count, size)
    view = memoryview(mapping)
    buffers = [view[at : at + size] for at in range(0, count * size, size)]
    memory = HostMemory(records, buffers, mapping)
    if pin:
        memory.pin()
    return memory


def _refused(total: int, why: str) -> MachineError:
    return MachineError(
        f"{total:,} bytes of host memory for experts cannot be had ({why})",
        "give a smaller --host-memory, or tier: disk",
    )
