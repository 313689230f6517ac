"""What an optimiser takes of a card: its moments, and with 8-bit moments what a step of it needs while all gradients are
there. AdamW with others is one fused kernel, which needs nothing.

As `step`, this is `learning.adamw8bit` written down as sizes, and must be changed where that is; a test compares it with
what a learner really takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from coresident.engines.pool.fit.forward import OPTIMIZER, TRANSIENTS
from coresident.engines.pool.fit.heap import Block, Heap
from coresident.engines.pool.learning.chunks import together

# As `adamw8bit` has them.
BLOCK, LEAST = 256, 4096


def start(heap: Heap, sizes: Sequence[int], eight: bool, exact: int) -> None:
    """Both moments of tensors of `sizes` numbers, in 8 bits or in `exact` bytes a number."""
    for numbers in sizes:
        small = eight and numbers >= LEAST
        if not eight:
            # The count of steps, which the fused kernel wants on the card.
            heap.take(4, OPTIMIZER)
        for _ in range(2):
            heap.take(numbers * (1 if small else exact), OPTIMIZER)
            if small:
                heap.take(-(-numbers // BLOCK) * 4, OPTIMIZER)


def step8(heap: Heap, sizes: Sequence[int]) -> None:
    """One step with 8-bit moments."""
    for eight in (True, False):
        alike = [numbers for numbers in sizes if (numbers >= LEAST) is eight]
        for chunk in together(alike):
            _update(heap, sum(-(-alike[number] // BLOCK) * BLOCK for number in chunk), eight)


def _update(heap: Heap, numbers: int, eight: bool) -> None:
    """Of one chunk."""
    give = heap.give
    whole, byte, scale = numbers * 4, numbers, numbers // BLOCK * 4

    def take(size: float) -> Block:
        return heap.take(size, TRANSIENTS)

    gradients = take(whole)
    if not eight:
        moments = [take(whole) for _ in range(2)]
        give(take(whole), gradients, *moments)
        return
    held = [take(byte), take(byte), take(scale), take(scale)]
    moments = []
    for _ in range(2):
        indices = take(whole)
        moments.append(take(whole))
        give(indices)
    give(take(whole), gradients)
    for moment in reversed(moments):
        scaled = take(whole)
        inverse = [take(scale) for _ in range(2)]
        give(*inverse)
        give(take(whole), scaled)
        if moment is moments[0]:
            give(take(byte), take(byte))
        give(moment)
    give(*held)
