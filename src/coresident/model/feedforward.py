"""The dense feed-forward block: SwiGLU (arXiv 2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from coresident.model.weight import unset


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where the last dimension holds gate and then up: [..., 2 f] -> [..., f]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)). Gate and up are one matrix, so that x is read once, and its gradient made once."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = unset(2 * inner, width)
        self.down = unset(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(swiglu(F.linear(x, self.gate_up)), self.down)
