"""RMSNorm: what transformers computes, with statistics that no input's dtype narrows."""

from __future__ import annotations

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from coresident.model.norm import RMSNorm


def _norms() -> tuple[RMSNorm, LlamaRMSNorm]:
    ours, theirs = RMSNorm(24, 1e-5), LlamaRMSNorm(24, 1e-5)
    with torch.no_grad():
        ours.weight.copy_(torch.randn(24))
        theirs.weight.copy_(ours.weight)
    return ours, theirs


def test_it_is_llamas() -> None:
    ours, theirs = _norms()
    x = torch.randn(3, 5, 24)
    torch.testing.assert_close(ours(x), theirs(x))


def test_bfloat16_input_is_squared_and_averaged_in_float32() -> None:
    ours, _ = _norms()
    x = (torch.randn(4, 24) * 100).to(torch.bfloat16)
    got = ours(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, ours(x.float()).to(torch.bfloat16), rtol=0, atol=0)


def test_float64_stays_float64() -> None:
    ours, _ = _norms()
    x = torch.randn(4, 24, dtype=torch.float64) + 1e-9
    wanted = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * ours.weight.double()
    torch.testing.assert_close(ours.double()(x), wanted, rtol=1e-14, atol=0)
