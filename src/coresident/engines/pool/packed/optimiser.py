"""AdamW over the rows of an arena: each learner with its own learning rate, warmup, clipping and number of steps.

The formula and its order of operations are those of `torch.optim.AdamW` (Loshchilov & Hutter, 2019) after
`clip_grads_with_norm_`. Whether a learner's loss and gradient are finite is decided where they are, on the device: a
learner for which they are not keeps every number that it had, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from coresident.engines.pool.learning.learner import warmup
from coresident.engines.pool.packed import moments8
from coresident.engines.pool.parameters import DPO

if TYPE_CHECKING:
    from torch import Tensor

    from coresident.engines.pool.packed.arena import Arena

# PyTorch's defaults.
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
PART = 1 << 22


def rates(settings: Sequence[DPO], steps: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What this step is for each learner, [N, 4]: step size, what decay leaves, the second moment's correction, and the
    norm to clip to. `steps` count from 1.
    """
    rows = []
    for own, step in zip(settings, steps, strict=True):
        rate = own.learning_rate * warmup(step, own.warmup_steps)
        rows.append(
            (
                rate / (1 - BETA1**step),
                1 - rate * own.weight_decay,
                (1 - BETA2**step) ** 0.5,
                own.clip,
            )
        )
    return torch.tensor(rows, dtype=dtype)


def norms(gradients: Tensor, dtype: torch.dtype) -> Tensor:
    """Each learner's gradient norm, [N], of [N, D]."""
    lengths: Tensor = torch.linalg.vector_norm(gradients, dim=1, dtype=dtype)
    return lengths


def advance(
    masters: Tensor,
    moments: Sequence[Tensor],
    gradients: Tensor,
    rates: Tensor,
    norms: Tensor,
    sound: Tensor,
    work: Tensor | None = None,
    tables: Sequence[Tensor] = (),
) -> None:
    """One step in place, for the learners that are `sound` [N]; blocks [N, D], `rates` [N, 4], `norms` [N]. `moments` are two
    such blocks, or the four of moments in 8 bits (`moments8`), which need `tables`. `work` takes over what `masters` are then.
    """
    going = sound[:, None]
    known = moments if len(moments) == 2 else moments8.decoded(moments, tables)
    new, first, second = _moved(masters, known[0], known[1], gradients, rates, norms)
    made = (first, second) if len(moments) == 2 else moments8.encoded(first, second, tables)
    for moment, value in zip(moments, made, strict=True):
        moment.copy_(torch.where(going, value, moment))
    masters.copy_(torch.where(going, new, masters))
    if work is not None:
        work.copy_(masters)


def _moved(
    masters: Tensor, first: Tensor, second: Tensor, gradients: Tensor, rates: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What all learners would be after the step, and their moments."""
    size, left, correction, clip = (column[:, None] for column in rates.unbind(1))
    # Moments in 8 bits are float32 when decoded, whatever the masters are.
    gradient = (gradients.to(masters.dtype) * torch.clamp(clip / (norms[:, None] + 1e-6), max=1.0)).to(
        first.dtype
    )
    first = torch.lerp(first, gradient, 1 - BETA1)
    second = second * BETA2 + (1 - BETA2) * gradient * gradient
    return masters * left - size * (first / (second.sqrt() / correction + EPSILON)), first, second


def advance_in_parts(arena: Arena, rates: Tensor, norms: Tensor, sound: Tensor) -> None:
    """The same, learner after learner and `PART` numbers at a time, so that what it needs meanwhile is little."""
    work = None if arena.work is arena.masters else arena.work
    for row in range(len(arena.ranks)):
        one = slice(row, row + 1)
        for start in range(0, arena.row, PART):
            part = slice(start, start + PART)
            moments = [moment[one, moments8.columns(moment, arena.masters, part)] for moment in arena.moments]
            advance(
                arena.masters[one, part],
                moments,
                arena.grads[one, part],
                rates[one],
                norms[one],
                sound[one],
                None if work is None else work[one, part],
                arena.tables,
            )
