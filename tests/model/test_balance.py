"""The two losses beside cross-entropy: of one layer, transformers'; of several, what transformers' adds up away."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

from coresident.model.balance import Routing, auxiliary, load_balancing, router_z

TOKENS, EXPERTS, TOP_K = 50, 6, 2
ALL = torch.ones(TOKENS)


def _drawn() -> tuple[Tensor, Tensor]:
    logits = (3 * torch.randn(TOKENS, EXPERTS)).requires_grad_()
    return logits, logits.topk(TOP_K).indices


def test_a_layers_balance_is_transformers_forward_and_backward() -> None:
    logits, chosen = _drawn()
    got, wanted = load_balancing(logits, chosen, ALL), load_balancing_loss_func((logits,), EXPERTS, TOP_K)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(torch.autograd.grad(got, logits), torch.autograd.grad(wanted, logits))


def test_tokens_that_do_not_count_are_transformers_attention_mask() -> None:
    logits, chosen = _drawn()
    counted = (torch.rand(TOKENS) < 0.7).float()
    wanted = load_balancing_loss_func((logits,), EXPERTS, TOP_K, counted.view(5, 10))
    torch.testing.assert_close(load_balancing(logits, chosen, counted), wanted)


def test_perfect_balance_gives_top_k() -> None:
    chosen = torch.arange(60).view(30, 2) % EXPERTS
    assert math.isclose(load_balancing(torch.zeros(30, EXPERTS), chosen, torch.ones(30)), TOP_K, rel_tol=1e-6)


def test_each_layer_is_balanced_by_itself() -> None:
    """Two layers that have collapsed on different experts look balanced to transformers, which adds them up first."""
    logits = []
    for half in (0, 1):
        preferred = torch.full((60, 4), -20.0)
        preferred[:, 2 * half : 2 * half + 2] = torch.rand(60, 2)
        logits.append(preferred)
    routing = Routing(tuple(logits), tuple(layer.topk(2).indices for layer in logits))
    assert math.isclose(load_balancing_loss_func(routing.logits, 4, 2), 2, rel_tol=1e-4)
    assert math.isclose(auxiliary(routing, torch.ones(60), balance=1, z=0), 4, rel_tol=1e-4)


def test_z_is_the_mean_square_of_the_log_of_the_sum() -> None:
    logits, _ = _drawn()
    wanted = logits.exp().sum(-1).log().square().mean()
    torch.testing.assert_close(router_z(logits, ALL), wanted)


def test_together_they_weigh_as_asked_and_average_over_layers() -> None:
    layers = [_drawn() for _ in range(3)]
    routing = Routing(tuple(logits for logits, _ in layers), tuple(chosen for _, chosen in layers))
    wanted = sum(0.3 * load_balancing(*layer, ALL) + 0.7 * router_z(layer[0], ALL) for layer in layers) / 3
    torch.testing.assert_close(auxiliary(routing, ALL, balance=0.3, z=0.7), wanted)


def test_where_no_token_counts_they_are_zero() -> None:
    logits, chosen = _drawn()
    assert auxiliary(Routing((logits,), (chosen,)), torch.zeros(TOKENS), balance=1, z=1) == 0
