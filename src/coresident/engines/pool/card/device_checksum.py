"""One number that says whether a base on the card is still the base, computed there.

Each chunk's 64-bit words are multiplied by odd weights that differ from word to word, and summed modulo
2^64: a change of one word always changes the sum (an odd number has an inverse), any other change misses
with a chance of about 2^-63. Integer sums are exact in any order. It runs at memory speed and needs a few MiB.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from coresident.engines.pool.base.tensors import Layout

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 1 << 20
# Odd constants of splitmix64, as signed 64-bit integers.
_FIRST, _SECOND = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)


def of_block(memory: Tensor, plan: Layout, used: Mapping[str, Tensor] | None = None) -> str:
    """SHA-256 (hex) over the layout and the sums of `memory`, uint8 [plan.size].

    `used` are the tensors that a model really computes with: one that lies elsewhere, however equal, changes
    the result.
    """
    total = hashlib.sha256()
    for slot in plan.slots:
        total.update(f"{slot.name} {slot.dtype} {list(slot.stored.shape)} {slot.offset}\n".encode())
    total.update(repr(sums(memory)).encode())
    for name in strays(memory, plan, used or {}):
        total.update(f"{name} lies elsewhere\n".encode())
    return total.hexdigest()


def sums(memory: Tensor) -> list[int]:
    """The weighted sum of each chunk; a tail shorter than a word counts as if padded with zeros."""
    import torch

    whole = memory.numel() // 8 * 8
    words = memory[:whole].view(torch.int64)
    weights = torch.arange(min(CHUNK, max(words.numel(), 1)), dtype=torch.int64, device=memory.device)
    weights.mul_(_FIRST).bitwise_xor_(weights >> 31).mul_(_SECOND).bitwise_or_(1)
    found = [(part * weights[: part.numel()]).sum() for part in torch.split(words, CHUNK)]
    if whole < memory.numel():
        tail = bytes(memory[whole:].tolist())
        found.append(torch.tensor(int.from_bytes(tail, "little"), dtype=torch.int64, device=memory.device))
    return list(torch.stack(found).tolist()) if found else []


def strays(memory: Tensor, plan: Layout, used: Mapping[str, Tensor]) -> list[str]:
    """The names in `used` whose tensors are not at any of the base's places in `memory`."""
    start = memory.data_ptr()
    places = {(start + slot.offset, slot.size) for slot in plan.slots}
    return sorted(
        name
        for name, tensor in used.items()
        if tensor.numel() and (tensor.data_ptr(), tensor.numel() * tensor.element_size()) not in places
    )
