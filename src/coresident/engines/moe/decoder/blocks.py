"""What a layer computes besides its experts, in plain operations on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from coresident.engines.moe.models.architecture import Architecture
from coresident.engines.moe.models.dense import Dense, Layer
from coresident.model.rope import rotate


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 and back (arXiv 1910.07467)."""
    exact = x.float()
    scaled = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def project(
    found: Architecture, dense: Dense, layer: Layer, x: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised, turned queries [N, heads, D], keys and values [N, kv_heads, D] of rows x [N, H] at `positions` [N]."""
    width = found.head_width
    sizes = [found.heads * width, found.kv_heads * width, found.kv_heads * width]
    query, key, value = torch.split(F.linear(x, layer.qkv), sizes, -1)
    if found.qk_norm == "full":
        query = rms_norm(query, layer.query_norm, found.eps)
        key = rms_norm(key, layer.key_norm, found.eps)
    query, key, value = (each.view(len(x), -1, width) for each in (query, key, value))
    if found.qk_norm == "head":
        query = rms_norm(query, layer.query_norm, found.eps)
        key = rms_norm(key, layer.key_norm, found.eps)
    if found.clip is not None:
        query, key, value = (each.clamp(-found.clip, found.clip) for each in (query, key, value))
    cosines, sines = dense.cosines[positions], dense.sines[positions]
    return rotate(query, cosines, sines), rotate(key, cosines, sines), value


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of [B, heads, N, D] over [B, kv_heads, T, D]; causal from the first token without a `mask`."""
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=query.shape[1] != key.shape[1]
    )


def router_logits(layer: Layer, x: Tensor) -> Tensor:
    """The router's raw scores of rows x [N, H]: float32 [N, E]."""
    assert layer.router is not None
    return F.linear(x.float(), layer.router)


def route(found: Architecture, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of each row, likeliest first [N, K] of int64, and their weights [N, K] of float32."""
    weights, chosen = logits.softmax(-1).topk(found.top_k)
    if found.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights


def feed_forward(layer: Layer, x: Tensor) -> Tensor:
    """A dense layer's SwiGLU."""
    assert layer.gate_up is not None and layer.down is not None
    gate, up = F.linear(x, layer.gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, layer.down)
