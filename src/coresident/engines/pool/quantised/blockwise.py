"""Numbers as indices into a table, with a scale for each block of them: what NF4, its double quantisation and 8-bit
optimiser states have in common (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Smaller scales count as this one, so that a block of zeros divides by something.
SMALLEST = 1e-38


@cache
def dynamic_map(*, signed: bool) -> Tensor:
    """The 256 values of the dynamic 8-bit type (Dettmers, "8-Bit Approximations for Parallelism in Deep Learning",
    2016), float32, ascending, from -1 or 0 to 1.

    For each power of ten from 1e-6 to 1 it has the midpoints of equal parts of [0.1, 1] of it, twice as many as for
    the power before, with both signs or, unsigned, twice as many again; and 0 and 1.
    """
    import torch

    found = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (power if signed else power + 1) + 1, dtype=torch.float32)
        middles = (edges[:-1] + edges[1:]) / 2
        scaled = (10.0 ** (power - 6) * middles).tolist()
        found += scaled + [-value for value in scaled] if signed else scaled
    return torch.tensor(sorted(found), dtype=torch.float32)


def nearest(numbers: Tensor, table: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Indices (uint8 [n]) of the values of `table` (ascending) nearest to the flat float32 `numbers` [n], each
    divided by its block's largest magnitude; and those magnitudes, float32 [blocks]. A last short block is one too.
    """
    import torch

    edges = (table[:-1] + table[1:]) / 2
    whole = len(numbers) - len(numbers) % block
    parts, indices, magnitudes = [(numbers[:whole].view(-1, block))], [], []
    if whole < len(numbers):
        parts.append(numbers[whole:].view(1, -1))
    for part in parts:
        largest = part.abs().amax(dim=1)
        # Times the reciprocal, not divided: there is a number between the two for which it matters.
        scaled = part * (1.0 / largest.clamp(min=SMALLEST))[:, None]
        indices.append(torch.bucketize(scaled, edges, out_int32=True).to(torch.uint8).view(-1))
        magnitudes.append(largest)
    return torch.cat(indices), torch.cat(magnitudes)


def values(indices: Tensor, table: Tensor, magnitudes: Tensor, block: int) -> Tensor:
    """What `nearest` gave, as float32 [n]: each table value times its block's magnitude."""
    found = table[indices.int()]
    whole = len(found) - len(found) % block
    found[:whole].view(-1, block).mul_(magnitudes[: whole // block, None])
    if whole < len(found):
        found[whole:].mul_(magnitudes[-1])
    return found
