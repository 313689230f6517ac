"""Causal self-attention, and which kernel computes it.

`auto` leaves the choice to PyTorch; `flash` and `cudnn` allow one kernel and nothing else, so that asking for one that
cannot run is an error and never a slower run; `reference` is the formula in plain operations, in any dtype, with
derivatives of every order, which no fused kernel has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from coresident.errors import MachineError, UserError, nearest
from coresident.model.norm import RMSNorm
from coresident.model.rope import rotate
from coresident.model.shape import ModelShape
from coresident.model.weight import unset

AttentionKernel = Literal["auto", "flash", "cudnn", "reference"]
KERNELS: tuple[AttentionKernel, ...] = get_args(AttentionKernel)
_FORCED = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class Attention(nn.Module):
    """Multi-head attention with rotary positions. Query, key and value are one matrix, in this order."""

    def __init__(self, shape: ModelShape, kernel: AttentionKernel) -> None:
        super().__init__()
        self.heads = shape.heads
        self.kernel = kernel
        self.qkv = unset(3 * shape.width, shape.width)
        self.out = unset(shape.width, shape.width)
        self.query_norm = RMSNorm(shape.width, shape.eps) if shape.qk_norm else None
        self.key_norm = RMSNorm(shape.width, shape.eps) if shape.qk_norm else None

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        query, key, value = F.linear(x, self.qkv).chunk(3, -1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        split = (*x.shape[:-1], self.heads, -1)
        mixed = attend(
            self.kernel,
            rotate(query.view(split), cosines, sines).transpose(1, 2),
            rotate(key.view(split), cosines, sines).transpose(1, 2),
            value.view(split).transpose(1, 2),
        )
        return F.linear(mixed.transpose(1, 2).reshape(x.shape), self.out)


def attend(kernel: AttentionKernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of [B, heads, T, D] each; raises MachineError where a forced kernel cannot run."""
    if kernel == "reference":
        return reference(query, key, value)
    if kernel == "auto":
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    if torch.compiler.is_compiling():
        return _forced(kernel, query, key, value)
    with _explained(kernel, query):
        return _forced(kernel, query, key, value)


def reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V over what is not in the future, with the softmax in float32 at least."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    exact = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1, dtype=exact)
    return weights.to(value.dtype) @ value


def check_kernel(
    kernel: AttentionKernel, shape: ModelShape, device: torch.device, dtype: torch.dtype
) -> None:
    """Run the kernel once, forward and backward, as the model would; raises MachineError where it cannot.

    `dtype` is that of the products: bfloat16 under autocast. A compiled step reports a refused kernel from inside the
    compiler; asked here first, it is one sentence.
    """
    if kernel not in KERNELS:
        raise UserError(f"there is no attention kernel {kernel!r}", nearest(kernel, KERNELS))
    torch.autograd.backward(attend(kernel, *_example(shape, device, dtype)).sum())


def dispatched(kernel: AttentionKernel, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel that really runs: PyTorch's `flash`, `efficient`, `cudnn` or `math`, or our `reference`. Raises as
    `check_kernel` does.
    """
    if kernel == "reference":
        return kernel
    query, key, value = _example(shape, device, dtype)
    with _explained(kernel, query), sdpa_kernel([_FORCED[kernel]]) if kernel in _FORCED else nullcontext():
        chosen = SDPBackend(torch._fused_sdp_choice(query, key, value, is_causal=True))
    if chosen == SDPBackend.ERROR:
        raise _cannot(kernel, query)
    return chosen.name.removesuffix("_ATTENTION").lower()


def _example(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    size = (3, 1, shape.context, shape.heads, shape.head_width)
    query, key, value = torch.zeros(size, device=device, dtype=dtype, requires_grad=True).transpose(2, 3)
    return query, key, value


def _forced(kernel: AttentionKernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel([_FORCED[kernel]]):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@contextmanager
def _explained(kernel: str, query: Tensor) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # Its words differ between processors and versions.
        if "viable backend" in str(error) or "available kernel" in str(error):
            raise _cannot(kernel, query) from error
        raise


def _cannot(kernel: str, query: Tensor) -> MachineError:
    return MachineError(
        f"the {kernel} attention kernel cannot run for {query.dtype} heads of {query.shape[-1]} on {query.device}",
        "set the attention kernel to auto, or train in bfloat16 on an NVIDIA card of compute capability 8.0 or newer",
    )
