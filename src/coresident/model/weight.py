"""A weight before it has values."""

from __future__ import annotations

import torch
from torch import nn


def unset(*size: int) -> nn.Parameter:
    """A float32 parameter full of NaN: a model that nobody initialised or loaded says so in its first loss."""
    return nn.Parameter(torch.full(size, float("nan")))
