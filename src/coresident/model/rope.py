"""Rotary positions (arXiv 2104.09864) in the half-split layout of GPT-NeoX and Llama: dimension i turns with i + D/2."""

from __future__ import annotations

import torch
from torch import Tensor


def tables(context: int, head_width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles: float32, [context, head_width / 2] each."""
    pairs = torch.arange(0, head_width, 2, dtype=torch.float32) / head_width
    angles = torch.arange(context, dtype=torch.float32)[:, None] * (1.0 / theta**pairs)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn x [B, T, heads, D] by its positions; tables [T, D / 2]. Computed in the wider dtype, returned in x's."""
    cosines, sines = cosines[:, None], sines[:, None]
    first, second = x.chunk(2, -1)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)
    return turned.to(x.dtype)
