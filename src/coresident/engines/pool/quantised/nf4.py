"""NF4, the 4-bit type of bitsandbytes, in plain PyTorch: what every faster version of it is held to.

A weight is cut into blocks of 64 numbers. Each block is divided by its largest magnitude (`absmax`), and each number
becomes the index of the nearest of 16 values, the quantiles of a normal distribution (Dettmers et al., "QLoRA", 2023,
appendix E); two indices a byte, the first in the upper half. Double quantisation holds `absmax` in 8 bits too: less
its mean, in blocks of 256, as an index into a table of 256 values (`blockwise`).

Bytes and values are those of bitsandbytes, so that its checkpoints can be read and ours be read by it; it is not
needed, and never imported (importing it starts CUDA, after which no process may fork).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coresident.engines.pool.quantised import blockwise

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK, NESTED_BLOCK = 64, 256
# The table as bitsandbytes stores it, float32.
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Form:
    """How one weight is quantised, apart from its tensors: its `shape` (out, in), numbers a block, and the mean of
    `absmax` (`offset`) with the blocks of its own quantisation, where that is double (else None and 0).
    """

    shape: tuple[int, int]
    block: int = BLOCK
    offset: float | None = None
    nested_block: int = 0

    @property
    def nested(self) -> bool:
        """Whether `absmax` is quantised too."""
        return self.offset is not None

    @property
    def elements(self) -> int:
        """How many numbers the weight has."""
        return math.prod(self.shape)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of the weight, by name."""
        blocks = -(-self.elements // self.block)
        found = {"weight": (-(-self.elements // 2), 1), "absmax": (blocks,), "quant_map": (16,)}
        if self.nested:
            found |= {"nested_absmax": (-(-blocks // self.nested_block),), "nested_quant_map": (256,)}
        return found


@dataclass(frozen=True)
class Quantised:
    """One weight: `weight` uint8 [elements / 2, 1]; `absmax` one a block, uint8 where nested, else float32;
    `quant_map` float32 [16]; `nested_absmax` float32, `nested_quant_map` float32 [256].
    """

    form: Form
    weight: Tensor
    absmax: Tensor
    quant_map: Tensor
    nested_absmax: Tensor | None = None
    nested_quant_map: Tensor | None = None


def quantise(weight: Tensor) -> Quantised:
    """Quantise a float weight [out, in], doubly, as bitsandbytes does: blocks of 64 and of 256."""
    import torch

    table = torch.tensor(VALUES)
    indices, absmax = blockwise.nearest(weight.reshape(-1).float(), table, BLOCK)
    if len(indices) % 2:
        indices = torch.cat([indices, indices.new_full((1,), VALUES.index(0.0))])
    packed = (indices[::2] << 4 | indices[1::2]).unsqueeze(1)
    # In float64, so that the number of threads that share the sum cannot show.
    offset = absmax.double().mean().float()
    nested_map = blockwise.dynamic_map(signed=True)
    nested, nested_absmax = blockwise.nearest(absmax - offset, nested_map, NESTED_BLOCK)
    rows, columns = weight.shape
    form = Form((rows, columns), BLOCK, float(offset), NESTED_BLOCK)
    return Quantised(form, packed, nested, table, nested_absmax, nested_map)


def scales(held: Quantised) -> Tensor:
    """The largest magnitude of each block, float32 [blocks]."""
    if held.nested_absmax is None or held.nested_quant_map is None or held.form.offset is None:
        return held.absmax
    found = blockwise.values(held.absmax, held.nested_quant_map, held.nested_absmax, held.form.nested_block)
    return found + held.form.offset


def dequantise(held: Quantised, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] in `dtype`, contiguous; products in float32, rounded once. Runs on any device."""
    import torch

    packed = held.weight.reshape(-1)
    indices = torch.stack([packed >> 4, packed & 15], dim=1).reshape(-1)[: held.form.elements]
    found = blockwise.values(indices, held.quant_map, scales(held), held.form.block)
    return found.to(dtype).reshape(held.form.shape)
