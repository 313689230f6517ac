"""How many bytes a base takes in 4 bits, told from its tensors' names and shapes alone. Needs no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from coresident.engines.pool.base.tensors import ALIGNMENT
from coresident.engines.pool.quantised.nf4 import BLOCK, NESTED_BLOCK, Form

# What a layer's state may take as JSON: files give it this much, so that its place is known before its content.
STATE_BYTES = 256
_NUMBERED = re.compile(r"\.\d+\.")


def quantisable(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is the weight of a linear layer inside the decoder: two-dimensional and in a numbered layer.
    Embeddings and the output layer are not, and stay as they are, as transformers leaves them.
    """
    return len(shape) == 2 and name.endswith(".weight") and bool(_NUMBERED.search(name))


def held(name: str, shape: Sequence[int], width: int, nf4: bool) -> int:
    """Bytes of one tensor of a base whose numbers take `width` bytes, in an allocation, with everything its 4-bit form
    needs where that is what is asked.
    """
    if not nf4 or not quantisable(name, shape):
        return _aligned(math.prod(shape) * width)
    form = Form((shape[0], shape[1]), BLOCK, 0.0, NESTED_BLOCK)
    one_byte = ("weight", "absmax")
    parts = sum(
        _aligned(math.prod(size) * (1 if part in one_byte else 4)) for part, size in form.sizes.items()
    )
    return parts + STATE_BYTES


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
