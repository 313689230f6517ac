"""A 4-bit layer computes with the dequantised weight, forward and backward, and keeps nothing of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from coresident.engines.pool.learning import frozen
from coresident.engines.pool.quantised import nf4
from coresident.engines.pool.quantised.linear import PREFIX, NF4Linear
from coresident.errors import InternalError


def layer(bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[NF4Linear, nn.Linear]:
    """A 4-bit layer of 96 inputs and 64 outputs, and the plain one with its dequantised weight."""
    torch.manual_seed(0)
    plain = nn.Linear(96, 64, bias=bias, dtype=dtype).requires_grad_(False)
    held = nf4.quantise(plain.weight)
    made = NF4Linear(held.form, bias, dtype)
    for name in held.form.sizes:
        parameter = nn.Parameter(getattr(held, name), requires_grad=False)
        made.register_parameter(name if name == "weight" else PREFIX + name, parameter)
    made.bias = plain.bias
    plain.weight.copy_(nf4.dequantise(held, dtype))
    return made, plain


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_are_those_of_the_dequantised_layer(bias: bool, dtype: torch.dtype) -> None:
    made, plain = layer(bias, dtype)
    x = torch.randn(2, 5, 96, dtype=dtype, requires_grad=True)
    y = made(x)
    assert torch.equal(y, plain(x))
    gradient = torch.randn_like(y)
    (ours,) = torch.autograd.grad(y, x, gradient)
    (theirs,) = torch.autograd.grad(plain(x), x, gradient)
    assert torch.allclose(ours, theirs, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)


def test_nothing_as_large_as_the_weight_is_kept_for_the_backward_pass() -> None:
    made, plain = layer()
    x = torch.randn(1, 96, requires_grad=True)
    for module, expected in ((made, 0), (plain, 1)):
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            module(x)
        assert sum(tensor.numel() >= 96 * 64 for tensor in kept) == expected


def test_frozen_products_of_both_kinds() -> None:
    made, plain = layer()
    x, g = torch.randn(2, 3, 96), torch.randn(2, 3, 64)
    for one in (made, plain):
        assert frozen.supported(one)
        assert torch.equal(frozen.product(one, x), F.linear(x, plain.weight, plain.bias))
        assert torch.equal(frozen.transposed(one, g), (g.view(-1, 64) @ plain.weight).view(2, 3, 96))
        assert not frozen.product(one, x.requires_grad_()).requires_grad


def test_other_layers_are_refused() -> None:
    assert not frozen.supported(nn.Conv1d(1, 1, 1))
    with pytest.raises(InternalError, match="Conv1d"):
        frozen.product(nn.Conv1d(1, 1, 1), torch.ones(1))


def test_to_peft_it_is_a_linear_layer() -> None:
    made, _ = layer()
    assert isinstance(made, nn.Linear)
    assert (made.in_features, made.out_features) == (96, 64)
    assert not any(parameter.requires_grad for parameter in made.parameters())


def test_a_layer_that_is_given_another_weight_uses_it() -> None:
    made, _ = layer()
    before = made.dequantised(torch.float32)
    other = nf4.quantise(torch.ones(64, 96))
    for name in other.form.sizes:
        value = nn.Parameter(getattr(other, name), requires_grad=False)
        made.register_parameter(name if name == "weight" else PREFIX + name, value)
    made.form = other.form
    assert not torch.equal(made.dequantised(torch.float32), before)
    assert torch.equal(made.dequantised(torch.float32), nf4.dequantise(other, torch.float32))
