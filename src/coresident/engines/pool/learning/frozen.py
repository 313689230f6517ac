"""The products of a frozen linear layer, whichever way its weight is held.

Whoever adapts a layer (one learner's LoRA, a pack of them) needs two things of it: x W' + b forward, and g W backward.
A 4-bit weight W is dequantised for one product and gone after it, so neither product may be left to autograd, which
would keep W between them. Call both without gradients (inside an autograd function); nothing here records any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from coresident.engines.pool.quantised.linear import NF4Linear
from coresident.errors import InternalError

if TYPE_CHECKING:
    from torch import Tensor


def supported(layer: nn.Module) -> bool:
    """Whether the layer is one that `product` and `transposed` know: a plain `nn.Linear` or a 4-bit one."""
    return type(layer) in (nn.Linear, NF4Linear)


@torch.no_grad()
def product(layer: nn.Module, x: Tensor) -> Tensor:
    """x W' + b: x [..., in] to a fresh [..., out], in x's dtype."""
    weight, bias = _weight(layer, x)
    return F.linear(x, weight, bias)


@torch.no_grad()
def transposed(layer: nn.Module, gradient: Tensor) -> Tensor:
    """g W: the gradient of x from that of x W' + b; [..., out] to a fresh [..., in], in g's dtype."""
    weight, _ = _weight(layer, gradient)
    return torch.mm(gradient.flatten(0, -2), weight).view(*gradient.shape[:-1], weight.shape[1])


def _weight(layer: nn.Module, beside: Tensor) -> tuple[Tensor, Tensor | None]:
    if isinstance(layer, NF4Linear):
        return layer.dequantised(beside.dtype), layer.bias
    if not isinstance(layer, nn.Linear):
        raise InternalError(f"a frozen product was asked of a {type(layer).__name__}")
    return layer.weight, layer.bias
