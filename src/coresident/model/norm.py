"""RMSNorm (arXiv 1910.07467) whose statistics are never narrower than float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coresident.model.weight import unset


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension of `width`; the result has x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = unset(width)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return (exact * scale * self.weight).to(x.dtype)
