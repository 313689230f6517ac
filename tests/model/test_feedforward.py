"""SwiGLU with gate and up in one matrix is transformers' with two."""

from __future__ import annotations

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from coresident.model.feedforward import FeedForward


def test_it_is_llamas() -> None:
    config = LlamaConfig(hidden_size=24, num_attention_heads=2, intermediate_size=40)
    ours, theirs = FeedForward(24, 40), LlamaMLP(config)
    with torch.no_grad():
        ours.gate_up.copy_(torch.cat((theirs.gate_proj.weight, theirs.up_proj.weight)))
        ours.down.copy_(theirs.down_proj.weight)
    x = torch.randn(3, 5, 24)
    torch.testing.assert_close(ours(x), theirs(x))
