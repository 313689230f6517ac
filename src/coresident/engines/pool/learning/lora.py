"""A LoRA layer in fewer and smaller operations than PEFT's own, which are most of a step's on a GPU.

y = x W' + b + s (x A') B', with W frozen in the base's dtype or in 4 bits (`frozen`), and A and B and both their
products in float32 (float64 for a float64 model), as PEFT does it without autocast. What differs is how often large things are
written: PEFT keeps a float32 copy of every layer's input for the backward pass (for a bfloat16 base twice what
the input itself takes, and three times for q, k and v) and scales, adds and rounds the output in passes of
their own. Here the input is converted again in the backward pass, the scale is applied to the r-wide product,
and the sum is taken in place: one rounding, in the last step, as there.

PEFT's layers stay what they are, names, weights and switches included; only `forward` is replaced, and only on
plain ones. PEFT's own forward pass is what this is held to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from coresident.engines.pool.learning import frozen

if TYPE_CHECKING:
    from torch import Tensor


def streamline(model: nn.Module, products: torch.dtype | None = None) -> int:
    """Replace the forward pass of every plain LoRA layer of a PEFT model; return how many there are.

    `products` is the dtype of the adapters' products, as under autocast (None: that of the adapters).
    """
    from peft.tuners.lora import Linear

    replaced = 0
    for layer in model.modules():
        if isinstance(layer, Linear) and _plain(layer):
            layer.forward = _forward(layer, next(iter(layer.lora_A)), products)
            replaced += 1
    return replaced


def _plain(layer: Any) -> bool:
    """Whether the layer is nothing but a linear layer with one adapter: no dropout, bias, variant or merge."""
    names = list(layer.lora_A)
    return (
        frozen.supported(layer.base_layer)
        and len(names) == 1
        and layer.active_adapters == names
        and isinstance(layer.lora_dropout[names[0]], nn.Identity)
        and layer.lora_B[names[0]].bias is None
        and not layer.lora_variant
        and not layer.merged
    )


def _forward(layer: Any, name: str, products: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    base, scale = layer.base_layer, float(layer.scaling[name])

    def forward(x: Tensor) -> Tensor:
        if layer._disable_adapters:
            return base(x)  # type: ignore[no-any-return]
        down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
        return _Lora.apply(x, down, up, base, scale, products or down.dtype)  # type: ignore[no-any-return, no-untyped-call]

    return forward


class _Lora(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, up: Tensor, base: nn.Module, scale: float, products: torch.dtype
    ) -> Tensor:
        ctx.exact = down.dtype
        down, up = down.to(products), up.to(products)
        # Called, so that hooks on it run.
        y: Tensor = base(x)
        wide = x.to(down.dtype).flatten(0, -2)
        narrow = torch.mm(wide, down.t())
        if scale != 1.0:
            narrow *= scale
        y.view(-1, y.shape[-1]).add_(torch.mm(narrow, up.t()))
        ctx.save_for_backward(x, down, up, narrow)
        ctx.base, ctx.scale = base, scale
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, down, up, narrow = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        wide = flat.to(up.dtype)
        for_up = torch.mm(wide.t(), narrow).to(ctx.exact) if ctx.needs_input_grad[2] else None
        inner = torch.mm(wide, up)
        del wide
        if ctx.scale != 1.0:
            inner *= ctx.scale
        for_down = None
        if ctx.needs_input_grad[1]:
            for_down = torch.mm(inner.t(), x.to(down.dtype).flatten(0, -2)).to(ctx.exact)
        for_x = None
        if ctx.needs_input_grad[0]:
            for_x = frozen.transposed(ctx.base, flat)
            for_x.add_(torch.mm(inner, down))
            for_x = for_x.view(x.shape)
        return for_x, for_down, for_up, None, None, None
