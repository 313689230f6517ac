"""Dequantisation on a GPU in one pass: packed indices and 8-bit scales in, the weight in the run's type out.

Plain operations (`nf4.dequantise`) write the weight six times over, at two to four times its size; this kernel reads
half a byte and writes two a number, which is all that has to be moved. Each product is rounded as there (no fused
multiply-add), so that the bits are the same, and those of bitsandbytes' own kernels.

Triton compiles for the card when a kernel is first called, so it is imported in a learner, not in a process that
forks. Where it is not installed, plain operations serve.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from coresident.engines.pool.quantised.nf4 import Quantised
from coresident.engines.pool.quantised.room import Room

if TYPE_CHECKING:
    from torch import Tensor

# Numbers a program makes: enough to keep loads wide, little enough for many programs on each core.
PART = 2048
INTERPRET = "TRITON_INTERPRET"


def serves(held: Quantised, dtype: torch.dtype) -> bool:
    """Whether the kernel does this: on a GPU (or under Triton's interpreter), to 16 or 32 bits, from doubly quantised
    blocks.
    """
    where = held.weight.is_cuda or (os.environ.get(INTERPRET) == "1" and held.weight.device.type == "cpu")
    return (
        where and held.form.nested and dtype in (torch.bfloat16, torch.float16, torch.float32) and installed()
    )


@cache
def installed() -> bool:
    """Whether Triton is here."""
    return importlib.util.find_spec("triton") is not None


def prepared(held: Quantised, dtype: torch.dtype, room: Room | None = None) -> Callable[[], Tensor]:
    """`nf4.dequantise(held, dtype)`, bit for bit, as often as it is called, for what the kernel `serves`; put into `room`,
    if there is one.

    All but the launch is done here, once: on a small step the interpreter's time is the step's.
    """
    form = held.form
    rows = max(PART // form.block, 1)
    blocks = -(-form.elements // form.block)
    launch = _kernel()[(-(-blocks // rows),)]
    device, shape = held.weight.device, form.shape
    place = (room or Room(form.elements)).place
    sizes = (form.offset, blocks, form.elements, held.weight.numel())
    inputs = (held.weight, held.absmax, held.nested_absmax, held.quant_map, held.nested_quant_map)
    # A scale is a product plus the offset: two roundings, as everywhere else.
    named = {
        "BLOCK": form.block,
        "NESTED": form.nested_block,
        "ROWS": rows,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }

    def dequantise() -> Tensor:
        out = place(shape, dtype, device)
        launch(*inputs, out, *sizes, **named)
        return out

    return dequantise


@cache
def _kernel() -> Any:
    from coresident.engines.pool.quantised.triton_nf4 import nf4_dequantise

    return nf4_dequantise
