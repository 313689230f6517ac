"""The model whole: what it may see, what its loss counts, and that it compiles as one graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradgradcheck
from torch.nn.utils import parameters_to_vector

from coresident.errors import UserError
from coresident.model.cross_entropy import IGNORED
from coresident.model.llama import Llama, Loss
from coresident.model.shape import ModelShape

Lively = Callable[..., Llama]
Text = Callable[..., tuple[Tensor, Tensor]]


def _gradient(model: Llama, loss: Tensor) -> Tensor:
    return parameters_to_vector(list(torch.autograd.grad(loss, list(model.parameters()))))


def _mean(loss: Loss) -> Tensor:
    return loss.cross_entropy / loss.targets + loss.auxiliary


def test_a_model_that_nobody_initialised_says_so(shape: ModelShape, text: Text) -> None:
    assert Llama(shape).loss(*text(2, 8)).cross_entropy.isnan()


def test_logits_depend_on_no_later_token(shape: ModelShape, lively: Lively, text: Text) -> None:
    model, (tokens, _) = lively(shape), text(2, 12)
    before = model.logits(model(tokens).hidden)
    tokens[:, 7] = (tokens[:, 7] + 1) % shape.vocabulary
    after = model.logits(model(tokens).hidden)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_the_output_layer_is_the_embedding_only_where_tied(
    shape: ModelShape, lively: Lively, text: Text
) -> None:
    tied, untied = lively(shape), lively(shape.model_copy(update={"tied": False}))
    assert tied.table is tied.embedding
    assert untied.table is not untied.embedding
    assert untied.logits(untied(text(1, 4)[0]).hidden).shape == (1, 4, shape.vocabulary)


def test_the_loss_is_of_the_logits(shape: ModelShape, lively: Lively, text: Text) -> None:
    model, (tokens, targets) = lively(shape), text(2, 12)
    loss = model.loss(tokens, targets)
    logs = model.logits(model(tokens).hidden).log_softmax(-1)
    torch.testing.assert_close(loss.cross_entropy, -logs.gather(-1, targets[..., None]).sum())
    assert loss.targets == 24
    assert (loss.auxiliary > 0) == (shape.mixture is not None)


def test_ignored_targets_are_in_no_sum(shape: ModelShape, lively: Lively, text: Text) -> None:
    model, (tokens, targets) = lively(shape), text(2, 12)
    short = model.loss(tokens[:1], targets[:1])
    targets[1] = IGNORED
    padded = model.loss(tokens, targets)
    for got, wanted in zip(padded, short, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("rows", [0, 100])
def test_microbatches_of_1_and_1023_targets_give_the_full_batchs_gradient(
    rows: int, lively: Lively, text: Text
) -> None:
    shape = ModelShape(vocabulary=61, layers=2, width=24, heads=2, feedforward=40, context=1024)
    model, (tokens, targets) = lively(shape, "auto", rows), text(2, 1024)
    targets[0, 1:] = IGNORED
    targets[1, 0] = IGNORED
    whole = model.loss(tokens, targets)
    parts = [model.loss(tokens[n : n + 1], targets[n : n + 1]) for n in (0, 1)]
    assert [int(part.targets) for part in parts] == [1, 1023]
    counted = sum(part.targets for part in parts)
    got = sum(_gradient(model, part.cross_entropy / counted) for part in parts)
    wanted = _gradient(model, whole.cross_entropy / whole.targets)
    assert isinstance(got, Tensor)
    assert (got - wanted).norm() < 1e-6 * wanted.norm()


def test_logits_made_in_chunks_change_nothing(shape: ModelShape, lively: Lively, text: Text) -> None:
    tokens, targets = text(3, 12)
    targets[0, 4:] = IGNORED
    plain, chunked = lively(shape), lively(shape, "auto", 7)
    torch.testing.assert_close(chunked.loss(tokens, targets), plain.loss(tokens, targets))
    torch.testing.assert_close(
        _gradient(chunked, _mean(chunked.loss(tokens, targets))),
        _gradient(plain, _mean(plain.loss(tokens, targets))),
    )


def test_the_fused_kernel_and_the_reference_train_alike(
    shape: ModelShape, lively: Lively, text: Text
) -> None:
    found = [
        _gradient(model, _mean(model.loss(*text(2, 32))))
        for model in (lively(shape, "auto"), lively(shape, "reference"))
    ]
    assert (found[0] - found[1]).norm() < 1e-5 * found[1].norm()


def test_the_reference_has_second_derivatives_through_the_whole_model(
    shape: ModelShape, lively: Lively, text: Text
) -> None:
    model = lively(shape, "reference").double()
    tokens, targets = text(1, 3)
    names = [name for name, _ in model.named_parameters() if name.endswith(("qkv", "attention_norm.weight"))][
        :2
    ]
    drawn = [dict(model.named_parameters())[name].detach().clone().requires_grad_() for name in names]

    def loss(*values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        found: Tensor = torch.func.functional_call(model, given, (tokens,)).hidden
        return torch.nn.functional.cross_entropy(model.logits(found)[0], targets[0])

    assert gradgradcheck(loss, drawn, fast_mode=True)


def test_under_autocast_weights_and_gradients_stay_float32_and_products_are_bfloat16(
    shape: ModelShape, lively: Lively, text: Text
) -> None:
    model, drawn = lively(shape), text(2, 32)
    exact = _gradient(model, _mean(model.loss(*drawn)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(*drawn)
        assert model.logits(model(drawn[0]).hidden).dtype == torch.bfloat16
    rough = _gradient(model, _mean(loss))
    assert loss.cross_entropy.dtype == rough.dtype == torch.float32
    assert not torch.equal(rough, exact)
    assert (rough - exact).norm() < 0.1 * exact.norm()


def test_longer_than_the_context_is_refused(shape: ModelShape, lively: Lively, text: Text) -> None:
    with pytest.raises(UserError, match="33 tokens do not fit a context of 32"):
        lively(shape)(text(1, 33)[0])


@pytest.mark.parametrize("rows", [0, 7])
def test_the_loss_compiles_as_one_graph(
    shape: ModelShape, rows: int, lively: Lively, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the graph is then made into: nothing in it waits for the host."""
    # As on a card; the loop over experts waits for how many tokens each has.
    monkeypatch.setattr("coresident.model.mixture.groups", lambda *_: True)
    torch.compiler.reset()
    model, drawn = lively(shape.model_copy(update={"layers": 1}), "flash", rows), text(3, 12)

    # Autocast inside of what is compiled: outside, the backward pass would be traced under it too, and differ.
    def loss(tokens: Tensor, targets: Tensor) -> Loss:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model.loss(tokens, targets)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=False)
    expected, got = loss(*drawn), compiled(*drawn)
    torch.testing.assert_close(got, expected)
    found, wanted = _gradient(model, _mean(got)), _gradient(model, _mean(expected))
    assert (found - wanted).norm() < 1e-3 * wanted.norm()
