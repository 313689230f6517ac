"""An update's gradient is that of the whole batch, however it is cut, and nothing is compiled for a short batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from coresident.engines.pretrain.parameters import Runtime
from coresident.engines.pretrain.update import Losses, Microbatch, accumulate
from coresident.model.initial import initialise
from coresident.model.llama import Llama
from coresident.model.shape import Mixture, ModelShape

SHAPE = ModelShape(vocabulary=64, layers=1, width=16, heads=2, feedforward=24, context=512)
EAGER = Runtime(compile=False)


def model(shape: ModelShape = SHAPE) -> Llama:
    return initialise(Llama(shape, "reference"), 0)


def losses(of: Llama) -> Losses:
    return Losses(of, EAGER, torch.float32, frozenset())


def parts(*valid: int, width: int = 512) -> list[Microbatch]:
    """Microbatches with so many valid targets each, two sequences apiece, the rest ignored."""
    source = torch.Generator().manual_seed(1)
    found = []
    for count in valid:
        tokens = torch.randint(0, 64, (2, width), generator=source)
        targets = torch.randint(0, 64, (2 * width,), generator=source)
        targets[count:] = -100
        found.append(Microbatch(tokens, targets.view(2, width), count))
    return found


def gradient(of: Llama) -> dict[str, torch.Tensor]:
    found = {name: one.grad.clone() for name, one in of.named_parameters() if one.grad is not None}
    of.zero_grad()
    return found


def whole(of: Llama, microbatches: list[Microbatch]) -> dict[str, torch.Tensor]:
    """The oracle: one forward pass over everything, and the mean over what counts."""
    tokens = torch.cat([one.tokens for one in microbatches])
    targets = torch.cat([one.targets for one in microbatches])
    logits = of.logits(of(tokens).hidden)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100).backward()
    return gradient(of)


def test_microbatches_of_1_and_1023_targets_give_the_gradient_of_the_whole_batch() -> None:
    one, batch = model(), parts(1, 1023)
    expected = whole(one, batch)
    loss, _ = accumulate(losses(one), batch)
    for name, found in gradient(one).items():
        torch.testing.assert_close(found, expected[name], rtol=0, atol=1e-6, msg=name)
    assert loss.dtype is torch.float64


def test_a_mean_of_means_would_be_seen() -> None:
    """The mutation that the test above is for."""
    one, batch = model(), parts(1, 1023)
    expected = whole(one, batch)
    for part in batch:
        accumulate(losses(one), [part])
    wrong = max(float((found / 2 - expected[name]).abs().max()) for name, found in gradient(one).items())
    assert wrong > 1e-3


def test_the_loss_is_the_mean_over_all_targets() -> None:
    one, batch = model(), parts(1, 1000, 7)
    together, _ = accumulate(losses(one), batch)
    alone = [float(accumulate(losses(one), [part])[0]) * part.valid for part in batch]
    assert float(together) == pytest.approx(sum(alone) / 1008, rel=1e-6)


def test_the_auxiliary_loss_of_experts_weighs_by_targets_and_reaches_the_router() -> None:
    mixture = Mixture(experts=4, top_k=2, width=12, balance=0.5, z=0.5)
    shape = ModelShape(vocabulary=64, layers=1, width=16, heads=2, context=64, mixture=mixture)
    one, batch = model(shape), parts(1, 120, width=64)
    _, together = accumulate(losses(one), batch)
    with_auxiliary = gradient(one)["layers.0.feedforward.router"]
    alone, router = [], []
    for part in batch:
        alone.append(float(accumulate(losses(one), [part])[1]))
        router.append(gradient(one)["layers.0.feedforward.router"])
    torch.testing.assert_close(with_auxiliary, (router[0] + 120 * router[1]) / 121)
    assert float(together) == pytest.approx((alone[0] + 120 * alone[1]) / 121, rel=1e-6)
    none = model(shape.model_copy(update={"mixture": mixture.model_copy(update={"balance": 0.0, "z": 0.0})}))
    accumulate(losses(none), batch)
    assert not torch.allclose(gradient(none)["layers.0.feedforward.router"], with_auxiliary)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch.compile is given to compile, graph by graph; the graphs then run as they are, so no compiler is awaited."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compiled(function: Any, *, fullgraph: bool, dynamic: bool, mode: str) -> Any:
        assert mode == "default"
        return compile_(function, fullgraph=fullgraph, dynamic=dynamic, backend=backend)

    torch._dynamo.reset()
    compile_ = functools.partial(torch.compile)
    monkeypatch.setattr(torch, "compile", compiled)
    return graphs


def test_full_microbatches_are_compiled_once_and_short_ones_run_eagerly(counted: list[Any]) -> None:
    one = model(SHAPE.model_copy(update={"context": 8}))
    compiled = Losses(one, Runtime(compile=True), torch.float32, frozenset({4}))
    eager = losses(one)
    for size in (4, 3, 4, 1, 4, 2, 4):
        tokens = torch.randint(0, 64, (size, 8))
        found, expected = compiled(tokens, tokens), eager(tokens, tokens)
        torch.testing.assert_close(found, expected)
        found[0].backward()
    assert len(counted) == 1
    assert compiled.compiled_calls == 4


def test_nothing_is_compiled_where_it_is_not_asked_for(counted: list[Any]) -> None:
    one = model(SHAPE.model_copy(update={"context": 8}))
    for runtime in (Runtime(), Runtime(compile=False)):
        asked = Losses(one, runtime, torch.float32, frozenset({4}))
        asked(*(2 * [torch.zeros(4, 8, dtype=torch.int64)]))
        assert (asked.compiles, asked.compiled_calls, len(counted)) == (False, 0, 0)


def test_products_are_bfloat16_where_asked_and_weights_and_gradients_stay_float32() -> None:
    one, batch = model(), parts(100)
    accumulate(Losses(one, EAGER, torch.bfloat16, frozenset()), batch)
    rough = gradient(one)
    accumulate(losses(one), batch)
    exact = gradient(one)
    assert {found.dtype for found in rough.values()} == {torch.float32}
    assert any(not torch.equal(found, exact[name]) for name, found in rough.items())
    for name, found in rough.items():
        torch.testing.assert_close(found, exact[name], rtol=0.1, atol=5e-3, msg=name)
