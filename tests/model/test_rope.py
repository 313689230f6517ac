"""Rotary positions: transformers' layout and tables, bit for bit."""

from __future__ import annotations

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from coresident.model.rope import rotate, tables


def test_the_tables_are_llamas() -> None:
    cosines, sines = tables(1024, 64, 1e4)
    theirs = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=1))
    theirs_cosines, theirs_sines = theirs(torch.zeros(1), torch.arange(1024)[None])
    assert cosines.dtype == torch.float32
    assert torch.equal(torch.cat((cosines, cosines), -1), theirs_cosines[0])
    assert torch.equal(torch.cat((sines, sines), -1), theirs_sines[0])


def test_turning_is_llamas_half_split() -> None:
    cosines, sines = tables(16, 8, 1e4)
    x = torch.randn(2, 16, 3, 8)
    twice = (torch.cat((cosines, cosines), -1)[None], torch.cat((sines, sines), -1)[None])
    wanted, _ = apply_rotary_pos_emb(x, x, *twice, unsqueeze_dim=2)
    torch.testing.assert_close(rotate(x, cosines, sines), wanted, rtol=1e-6, atol=1e-6)


def test_a_product_depends_on_the_distance_only() -> None:
    cosines, sines = tables(40, 8, 1e4)
    query, key = (torch.randn(8).expand(1, 40, 1, 8) for _ in range(2))
    turned_query, turned_key = (rotate(x, cosines, sines)[0, :, 0] for x in (query, key))
    products = turned_query @ turned_key.T
    for distance in (0, 1, 7):
        along = products.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-5)


def test_bfloat16_is_turned_in_float32_and_rounded_once() -> None:
    cosines, sines = tables(16, 8, 1e4)
    x = torch.randn(2, 16, 3, 8).to(torch.bfloat16)
    assert torch.equal(rotate(x, cosines, sines), rotate(x.float(), cosines, sines).to(torch.bfloat16))
