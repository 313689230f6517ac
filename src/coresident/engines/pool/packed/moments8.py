"""AdamW's two moments in 8 bits, in blocks of 256 numbers of an arena's rows, as functions without effects.

The state is that of `learning.adamw8bit` (Dettmers et al., 2022): indices into a dynamic map and a float32 scale for each
block. There each tensor is cut into blocks of its own, here a learner's row is, in which tensors of whole blocks lie on
them. Written so that a compiler can make one kernel of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from coresident.engines.pool.learning.adamw8bit import BLOCK
from coresident.engines.pool.quantised.blockwise import SMALLEST, dynamic_map

if TYPE_CHECKING:
    from torch import Tensor


def fresh(masters: Tensor) -> list[Tensor]:
    """Moments of zeros for [N, D], D a multiple of 256: indices uint8 [N, D] of both, scales [N, D / 256] of both."""
    indices = [
        torch.full_like(masters, int((dynamic_map(signed=signed) == 0).nonzero()[0]), dtype=torch.uint8)
        for signed in (True, False)
    ]
    scales = [
        masters.new_zeros((len(masters), masters.shape[1] // BLOCK), dtype=torch.float32) for _ in indices
    ]
    return indices + scales


def tables(device: torch.device) -> list[Tensor]:
    """The values that indices of the first and of the second moment stand for."""
    return [dynamic_map(signed=signed).to(device) for signed in (True, False)]


def decoded(moments: Sequence[Tensor], tables: Sequence[Tensor]) -> list[Tensor]:
    """Both moments, float32 [N, D]."""
    found = []
    for indices, scales, table in zip(moments[:2], moments[2:], tables, strict=True):
        found.append((table[indices.int()].view(len(indices), -1, BLOCK) * scales[:, :, None]).flatten(1))
    return found


def encoded(first: Tensor, second: Tensor, tables: Sequence[Tensor]) -> list[Tensor]:
    """The four tensors of both moments: nearest values, but never none for a small negative one."""
    indices, scales = [], []
    for moment, table, signed in zip((first, second), tables, (True, False), strict=True):
        blocks = moment.reshape(len(moment), -1, BLOCK)
        scale = blocks.abs().amax(2)
        scaled = (blocks * (1.0 / scale.clamp(min=SMALLEST))[:, :, None]).flatten(1)
        nearest = torch.bucketize(scaled, (table[:-1] + table[1:]) / 2, out_int32=True)
        if signed:
            nearest = nearest - ((table[nearest] == 0) & (moment < 0)).int()
        indices.append(nearest.to(torch.uint8))
        scales.append(scale)
    return indices + scales


def columns(moment: Tensor, masters: Tensor, part: slice) -> slice:
    """Where in `moment` the columns `part` of the masters are: a scale stands for a block of them."""
    if moment.shape[1] == masters.shape[1]:
        return part
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))
