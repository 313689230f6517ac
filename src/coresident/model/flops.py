"""Arithmetic that a token costs, and the peak it is held against."""

from __future__ import annotations

from coresident.model.shape import ModelShape

# Dense bfloat16 with float32 sums, FLOP/s, from NVIDIA's data sheets (H100, H200 and GH200 share one die: 989.4, which
# the published figures round). By the whole name that the driver gives: a MIG slice or a variant is not its card.
_PEAKS = {
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA GH200 120GB": 989e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
}


def flops_per_token(shape: ModelShape) -> int:
    """FLOPs of one target's training step, forward and backward: 6 (V d + L (4 d^2 + 3 d f)) + 12 L d T.

    T is the context, and attention counts whole, as if nothing were masked (PaLM, arXiv 2204.02311, appendix B).
    With experts, f is top_k times an expert's width, and a router adds E d: what a token uses.
    """
    width, mixture = shape.width, shape.mixture
    if mixture:
        block = 3 * width * mixture.top_k * mixture.width + mixture.experts * width
    else:
        block = 3 * width * (shape.feedforward or 0)
    products = shape.vocabulary * width + shape.layers * (4 * width * width + block)
    return 6 * products + 12 * shape.layers * width * shape.context


def peak_flops(device_name: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of a card by its whole name; None for one that is not known, so that no MFU is invented."""
    return _PEAKS.get(device_name)
