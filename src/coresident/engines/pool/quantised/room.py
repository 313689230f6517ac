"""Where a dequantised weight is put: memory of its own, or one place for all of them while gradients are made.

In the backward pass, what stays (gradients, and activations made again) would come to lie where the last weight was, and
the next, the largest thing there is with few tokens, would need new memory: measured, a fifth more than is ever held at
once. So it keeps its place until the pass is over. Only there: the place is held where least else is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Room:
    """For weights of at most `elements` numbers, one at a time."""

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._open = False
        self._memory: Tensor | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Within, every weight is put where the one before it was, and is gone with the next."""
        self._open = True
        try:
            yield
        finally:
            self._open, self._memory = False, None

    def place(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a weight, contiguous, whatever is in it."""
        if not self._open:
            return torch.empty(shape, dtype=dtype, device=device)
        if self._memory is None or self._memory.dtype != dtype:
            self._memory = torch.empty(self._elements, dtype=dtype, device=device)
        return self._memory[: math.prod(shape)].view(shape)
