"""The Mixture-of-Experts block is transformers' OLMoE block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

from coresident.model import mixture as block
from coresident.model.mixture import MixtureBlock
from coresident.model.shape import Mixture

WIDTH, INNER, EXPERTS, TOP_K = 24, 16, 6, 2


def _pair(normalise: bool) -> tuple[MixtureBlock, OlmoeSparseMoeBlock]:
    ours = MixtureBlock(WIDTH, Mixture(experts=EXPERTS, top_k=TOP_K, width=INNER, normalise=normalise))
    theirs = OlmoeSparseMoeBlock(
        OlmoeConfig(
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            num_attention_heads=2,
            norm_topk_prob=normalise,
        )
    )
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape))
        theirs.gate.weight.copy_(ours.router)
        theirs.experts.gate_up_proj.copy_(ours.gate_up)
        theirs.experts.down_proj.copy_(ours.down)
    return ours, theirs


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("by_groups", [False, True])
def test_it_is_olmoes_forward_and_backward(
    normalise: bool, by_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "groups", lambda *_: by_groups)
    ours, theirs = _pair(normalise)
    x = torch.randn(3, 7, WIDTH, requires_grad=True)
    found: list[tuple[Tensor, ...]] = []
    for mixed, weights in (
        (ours(x)[0], (ours.router, ours.gate_up, ours.down)),
        (theirs(x), (theirs.gate.weight, theirs.experts.gate_up_proj, theirs.experts.down_proj)),
    ):
        slopes = torch.arange(mixed.numel()).view_as(mixed).cos()
        found.append((mixed, *torch.autograd.grad((mixed * slopes).sum(), (x, *weights))))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_it_tells_its_routers_logits_and_choice() -> None:
    ours, theirs = _pair(normalise=False)
    x = torch.randn(3, 7, WIDTH)
    _, logits, chosen = ours(x)
    their_logits, _, their_choice = theirs.gate(x)
    torch.testing.assert_close(logits, their_logits)
    assert torch.equal(chosen, their_choice)


def test_under_autocast_the_router_stays_exact() -> None:
    """In bfloat16 two of 64 logits are often equal, and which expert a tie takes is noise."""
    ours, _ = _pair(normalise=False)
    x = torch.randn(3, 7, WIDTH)
    mixed, logits, chosen = ours(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough, rough_logits, rough_choice = ours(x)
    assert torch.equal(rough_logits, logits)
    assert torch.equal(rough_choice, chosen)
    assert not torch.equal(rough, mixed)
    assert (rough - mixed).norm() < 2e-2 * mixed.norm()


def test_off_a_card_experts_run_one_after_another() -> None:
    assert not block.groups(torch.device("cpu"), torch.bfloat16, torch.zeros(6, 32, 24))


def test_rows_that_are_not_whole_16_bytes_run_one_after_another() -> None:
    """The grouped product refuses them, so it is not asked."""
    hopper = torch.device("cuda")
    assert not block.groups(hopper, torch.bfloat16, torch.zeros(6, 40, 24))
    assert not block.groups(hopper, torch.bfloat16, torch.zeros(6, 32, 20))
    assert not block.groups(hopper, torch.float32, torch.zeros(6, 32, 24))
