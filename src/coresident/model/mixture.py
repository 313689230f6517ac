"""The Mixture-of-Experts block of OLMoE: a linear router, a softmax over all experts, the K likeliest, their weighted sum."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coresident.model import experts
from coresident.model.shape import Mixture
from coresident.model.weight import unset


class MixtureBlock(nn.Module):
    """x [B, T, d] to the weighted sum of its experts [B, T, d], the router's logits [B T, E] and choice [B T, K]."""

    def __init__(self, width: int, mixture: Mixture) -> None:
        super().__init__()
        self.top_k, self.normalise = mixture.top_k, mixture.normalise
        self.router = unset(mixture.experts, width)
        self.gate_up = unset(mixture.experts, 2 * mixture.width, width)
        self.down = unset(mixture.experts, width, mixture.width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.reshape(-1, x.shape[-1])
        logits = self._logits(rows)
        weights, chosen = logits.softmax(-1).topk(self.top_k)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        kind = _products(rows)
        through = experts.grouped if groups(rows.device, kind, self.gate_up) else experts.plain
        with torch.autocast(rows.device.type, enabled=False):
            mixed = through(rows.to(kind), chosen, weights, self.gate_up.to(kind), self.down.to(kind))
        return mixed.view(x.shape), logits, chosen

    def _logits(self, rows: Tensor) -> Tensor:
        # In float32 under autocast too: bfloat16 logits tie, and which experts a tie takes is noise (Switch Transformer,
        # section 2.4).
        exact = torch.promote_types(rows.dtype, torch.float32)
        with torch.autocast(rows.device.type, enabled=False):
            return F.linear(rows.to(exact), self.router.to(exact))


def _products(rows: Tensor) -> torch.dtype:
    """The dtype that autocast, which knows no grouped product, would take."""
    device = rows.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype


def groups(device: torch.device, kind: torch.dtype, gate_up: Tensor) -> bool:
    """Whether PyTorch has a kernel for the grouped product: bfloat16 on compute capability 9.0, rows of whole 16 bytes."""
    if device.type != "cuda" or kind != torch.bfloat16 or gate_up.shape[1] % 16 or gate_up.shape[2] % 8:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
