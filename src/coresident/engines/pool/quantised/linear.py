"""A frozen linear layer whose weight is held in NF4, and dequantised for each product.

To PEFT it is an `nn.Linear`: LoRA layers are put around it as around any other. Its tensors are parameters, so that
they are attached, checksummed and looked for in shared memory as all of a base's are; their names in a checkpoint are
`checkpoint`'s to say.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from coresident.engines.pool.quantised import kernel
from coresident.engines.pool.quantised.nf4 import Form, Quantised, dequantise
from coresident.engines.pool.quantised.room import Room

if TYPE_CHECKING:
    from torch import Tensor

# A parameter's name here has this before its name in bitsandbytes' checkpoints, where it is not `weight` itself.
PREFIX = "nf4_"


class NF4Linear(nn.Linear):
    """`form.shape` is (out, in). Made without numbers, on the meta device; whoever attaches the base gives them."""

    def __init__(self, form: Form, bias: bool, dtype: torch.dtype) -> None:
        # Not nn.Linear's own, which would make and fill a float weight.
        nn.Module.__init__(self)
        self.out_features, self.in_features = form.shape
        self.form = form
        for name, size in form.sizes.items():
            kind = torch.uint8 if name == "weight" or (name == "absmax" and form.nested) else torch.float32
            empty = nn.Parameter(torch.empty(size, dtype=kind, device="meta"), requires_grad=False)
            self.register_parameter(name if name == "weight" else PREFIX + name, empty)
        self.room: Room | None = None
        self._ways: dict[torch.dtype, tuple[Any, Callable[[], Tensor]]] = {}
        given = torch.empty(self.out_features, dtype=dtype, device="meta") if bias else None
        self.register_parameter("bias", None if given is None else nn.Parameter(given, requires_grad=False))

    @property
    def held(self) -> Quantised:
        """The weight as it is held."""
        return Quantised(
            self.form,
            self.weight,
            self.nf4_absmax,  # type: ignore[arg-type]
            self.nf4_quant_map,  # type: ignore[arg-type]
            getattr(self, PREFIX + "nested_absmax", None),
            getattr(self, PREFIX + "nested_quant_map", None),
        )

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] for one product: by our kernel on a GPU, else by plain operations. It is fresh, unless the
        layer shares a `room` that is open.
        """
        weight = self._parameters["weight"]
        known = self._ways.get(dtype)
        if known is None or known[0] is not weight:
            held = self.held
            plain = partial(dequantise, held, dtype)
            way = kernel.prepared(held, dtype, self.room) if kernel.serves(held, dtype) else plain
            known = self._ways[dtype] = weight, way
        return known[1]()

    def forward(self, x: Tensor) -> Tensor:
        """x W' + b: [..., in] to [..., out]. Differentiable by x, without keeping W for it."""
        return _Product.apply(x, self)  # type: ignore[no-any-return,no-untyped-call]


def share_room(model: nn.Module) -> Room:
    """Have all 4-bit layers of a model put their dequantised weights into one room. Before their first use."""
    layers = [layer for layer in model.modules() if isinstance(layer, NF4Linear)]
    room = Room(max((layer.form.elements for layer in layers), default=0))
    for layer in layers:
        layer.room = room
    return room


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: NF4Linear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.dequantised(x.dtype), layer.bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.layer.dequantised(gradient.dtype)
        flat = torch.mm(gradient.flatten(0, -2), weight)
        return flat.view(*gradient.shape[:-1], weight.shape[1]), None
