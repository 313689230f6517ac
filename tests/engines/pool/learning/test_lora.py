"""The LoRA layer: PEFT's own results from fewer operations, and PEFT's own layer wherever it is more than plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from coresident.engines.pool.learning.lora import streamline
from coresident.engines.pool.quantised import nf4
from coresident.engines.pool.quantised.linear import PREFIX, NF4Linear


class Net(nn.Module):
    """Two layers, so that a gradient reaches one through the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5, bias=False)

    def forward(self, x: Any) -> Any:
        return self.second(torch.tanh(self.first(x)))


def built(dtype: torch.dtype, **options: Any) -> Any:
    torch.manual_seed(5)
    config = LoraConfig(**{"r": 3, "lora_alpha": 7.5, "target_modules": ["first", "second"]} | options)
    model = get_peft_model(Net().to(dtype), config)
    source = torch.Generator().manual_seed(6)
    for name, value in model.named_parameters():
        if "lora_" in name:
            exact = torch.float64 if dtype == torch.float64 else torch.float32
            value.data = torch.randn(value.shape, generator=source).to(exact)
    return model.eval()


def results(model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    x = torch.linspace(-1, 1, 2 * 4 * 6).view(2, 4, 6).to(dtype).requires_grad_()
    y = model(x)
    y.backward(torch.linspace(-1, 2, y.numel()).view(y.shape).to(dtype))
    gradients = {name: value.grad for name, value in model.named_parameters() if value.requires_grad}
    assert len(gradients) == 4
    return {"y": y.detach(), "x": x.grad, **gradients}


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_outputs_and_gradients_are_pefts(dtype: torch.dtype, close: float) -> None:
    ours, theirs = built(dtype), built(dtype)
    assert streamline(ours) == 2
    expected = results(theirs, dtype)
    for name, value in results(ours, dtype).items():
        assert value.dtype == expected[name].dtype
        tolerance = close * expected[name].abs().max().item()
        torch.testing.assert_close(value, expected[name], rtol=close, atol=tolerance, msg=name)


def test_a_zero_adapter_and_a_disabled_one_are_the_base_bit_for_bit() -> None:
    model = built(torch.bfloat16)
    streamline(model)
    x = torch.randn((3, 6), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    with model.disable_adapter():
        base = model(x)
    assert not torch.equal(model(x), base)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            value.data.zero_()
    assert torch.equal(model(x), base)


def test_what_it_keeps_for_the_backward_pass_is_no_second_copy_of_its_input() -> None:
    def kept(model: Any) -> int:
        sizes: dict[int, int] = {}

        def pack(value: torch.Tensor) -> torch.Tensor:
            sizes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return value

        x = torch.ones((64, 6), dtype=torch.bfloat16).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            model(x)
        return sum(sizes.values())

    ours, theirs = built(torch.bfloat16), built(torch.bfloat16)
    streamline(ours)
    assert kept(ours) < 0.6 * kept(theirs)


@pytest.mark.parametrize("options", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}])
def test_a_layer_that_is_more_than_plain_stays_pefts(options: dict[str, Any]) -> None:
    assert streamline(built(torch.float32, **options)) == 0


def test_a_hook_on_the_base_layer_still_runs() -> None:
    model, seen = built(torch.float32), []
    streamline(model)
    model.base_model.model.first.base_layer.register_forward_pre_hook(lambda *_: seen.append(1))
    model(torch.ones((1, 6)))
    assert seen == [1]


def test_over_a_4_bit_layer_it_is_what_it_is_over_the_dequantised_one() -> None:
    """Values and gradients; and the layer is taken for a plain one, not left to PEFT."""
    model = built(torch.float32)
    first = model.base_model.model.first
    held = nf4.quantise(first.base_layer.weight)
    with torch.no_grad():
        first.base_layer.weight.copy_(nf4.dequantise(held, torch.float32))
    x = torch.randn((3, 6), generator=torch.Generator().manual_seed(0))
    found = []
    for in_4_bits in (False, True):
        if in_4_bits:
            layer = NF4Linear(held.form, first.base_layer.bias is not None, torch.float32)
            for name in held.form.sizes:
                value = torch.nn.Parameter(getattr(held, name), requires_grad=False)
                layer.register_parameter(name if name == "weight" else PREFIX + name, value)
            layer.bias = first.base_layer.bias
            first.base_layer = layer
        assert streamline(model) > 0
        assert "forward" in vars(first)
        model.zero_grad()
        given = x.clone().requires_grad_()
        y = first(given)
        y.square().sum().backward()
        adapters = [value.grad.clone() for value in first.parameters() if value.grad is not None]
        found.append([y.detach(), given.grad, *adapters])
    assert len(found[1]) == 4
    for plain, other in zip(*found, strict=True):
        assert torch.allclose(plain, other, atol=1e-6)


def test_products_in_bfloat16_are_those_under_autocast() -> None:
    dtype = torch.bfloat16
    ours, theirs = built(dtype), built(dtype)
    assert streamline(ours, dtype) == 2
    with torch.autocast("cpu", dtype):
        expected = results(theirs, dtype)
    found = results(ours, dtype)
    for name, value in found.items():
        # What is learned stays in float32.
        assert value.dtype == expected[name].dtype
        tolerance = 2e-2 * expected[name].abs().max().item()
        torch.testing.assert_close(value, expected[name], rtol=2e-2, atol=tolerance, msg=name)
    exact = built(dtype)
    streamline(exact)
    gradient = next(name for name in found if "lora_A" in name)
    assert not torch.equal(results(exact, dtype)[gradient], found[gradient]), "it makes a difference"
