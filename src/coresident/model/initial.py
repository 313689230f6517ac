"""Initial weights, each drawn from its own name and the seed: the same on every device, in any order, for any number
of models.
"""

from __future__ import annotations

import hashlib
import math

import torch

from coresident.model.llama import Llama

STANDARD = 0.02
# What writes into the residual stream: 2 L such sums keep its variance.
_RESIDUAL = ("attention.out", "feedforward.down")


@torch.no_grad()
def initialise(model: Llama, seed: int) -> Llama:
    """Set every weight in place and return the model: norms 1, matrices N(0, 0.02), those into the residual stream
    N(0, 0.02 / sqrt(2 layers)) (GPT-2). Drawn on the CPU in float32, whatever the model's device and dtype.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
            continue
        spread = STANDARD
        if name.endswith(_RESIDUAL):
            spread /= math.sqrt(2 * model.shape.layers)
        named = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(named[:8], "little") >> 1)
        drawn = torch.empty(parameter.shape, dtype=torch.float32)
        parameter.copy_(drawn.normal_(0.0, spread, generator=generator))
    return model
