"""What a decoder layer of Llama's kind does between its matrix products, forward and backward, as plain functions of
tensors. On a card these are most of a step's memory traffic, so that there each is compiled into one kernel; uncompiled
they are the same functions.

Norms are computed in float32 whatever the model's dtype, as transformers has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm (Zhang & Sennrich, 2019) of [T, d] over d."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(x.dtype)


def add_normed(x: Tensor, more: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x + more, and its norm."""
    total = x + more
    return total, normed(total, weight, epsilon)


def norm_back(x: Tensor, weight: Tensor, epsilon: float, gradient: Tensor, beside: Tensor) -> Tensor:
    """The gradient of x, given that of normed(x) and the one that reaches x `beside` the norm."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    unit = wide * scale
    scaled = (gradient * weight).float()
    return beside + (scale * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))).to(x.dtype)


def rotated(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary positions (Su et al., 2021) for [T, heads, d] and [T, key heads, d]; angles [T, d], their halves equal. With
    the negative sine it is its own transpose.
    """
    return _rotated(query, cosine, sine), _rotated(key, cosine, sine)


def _rotated(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    one, other = states.chunk(2, dim=-1)
    return states * cosine[:, None] + torch.cat((-other, one), dim=-1) * sine[:, None]


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU (Shazeer, 2020)."""
    return F.silu(gate) * up


def gated_back(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, given that of gated(gate, up)."""
    exact = torch.promote_types(gate.dtype, torch.float32)
    g, u, d = gate.to(exact), up.to(exact), gradient.to(exact)
    share = torch.sigmoid(g)
    return (d * u * share * (1 + g * (1 - share))).to(gate.dtype), (d * g * share).to(up.dtype)


def scored(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities [R] of `labels` under `logits` [R, V], and their gradient by the logits [R, V], in the logits' dtype:
    one at the label less the probabilities, before rounding.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    wide = logits.to(exact)
    total = torch.logsumexp(wide, dim=-1, keepdim=True)
    score = wide.gather(1, labels[:, None]) - total
    at_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    slope = torch.where(at_label, -torch.expm1(score), -torch.exp(wide - total))
    return score[:, 0], slope.to(logits.dtype)


def score_alone(logits: Tensor, labels: Tensor) -> Tensor:
    """The log-probabilities alone."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.gather(1, labels[:, None])[:, 0] - torch.logsumexp(wide, dim=-1)


@dataclass(frozen=True)
class Pointwise:
    """All of them, by name, for whoever takes them compiled or not."""

    normed: Callable[..., Any] = normed
    add_normed: Callable[..., Any] = add_normed
    norm_back: Callable[..., Any] = norm_back
    rotated: Callable[..., Any] = rotated
    gated: Callable[..., Any] = gated
    gated_back: Callable[..., Any] = gated_back
    scored: Callable[..., Any] = scored
    score_alone: Callable[..., Any] = score_alone

    def compiled(self) -> Pointwise:
        """The same, each compiled into as few kernels as may be."""
        return Pointwise(
            **{field.name: torch.compile(getattr(self, field.name), fullgraph=True) for field in fields(self)}
        )
