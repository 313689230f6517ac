"""On a card: the kernels that were asked for run, grouped experts compute the loop over experts, nothing waits for the
host, and logits in chunks are never there whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from coresident.errors import MachineError
from coresident.model import cross_entropy, experts
from coresident.model.attention import AttentionKernel, attend, check_kernel, dispatched, reference
from coresident.model.initial import initialise
from coresident.model.llama import Llama, Loss
from coresident.model.mixture import groups
from coresident.model.presets import PRESETS
from coresident.model.shape import ModelShape

pytestmark = pytest.mark.gpu

CARD = torch.device("cuda")
SMALL = PRESETS["20m"].model_copy(update={"layers": 2})
MIXED = PRESETS["moe-64"].model_copy(update={"layers": 2})


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the card is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _far(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def _text(shape: ModelShape, batch: int) -> tuple[Tensor, Tensor]:
    rows = torch.randint(0, shape.vocabulary, (batch, shape.context + 1), device=CARD)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _loss(model: Llama, tokens: Tensor, targets: Tensor) -> Loss:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return model.loss(tokens, targets)


def _mean(loss: Loss) -> Tensor:
    return loss.cross_entropy / loss.targets + loss.auxiliary


@pytest.mark.parametrize("kernel", ["auto", "flash", "cudnn"])
def test_a_kernel_computes_the_reference_forward_and_backward(kernel: AttentionKernel) -> None:
    torch.manual_seed(0)
    drawn = torch.randn(3, 2, 256, 5, 64, device=CARD, dtype=torch.bfloat16, requires_grad=True)
    exact = drawn.detach().float().requires_grad_()
    slopes = torch.randn(2, 5, 256, 64, device=CARD)
    got = attend(kernel, *drawn.transpose(2, 3))
    wanted = reference(*exact.transpose(2, 3))
    assert _far(got, wanted) < 1e-2
    (by,) = torch.autograd.grad((got * slopes).sum(), drawn)
    (wanted_by,) = torch.autograd.grad((wanted * slopes).sum(), exact)
    assert _far(by, wanted_by) < 1e-2


@pytest.mark.parametrize(("kernel", "named"), [("flash", "flash"), ("cudnn", "cudnn")])
def test_the_kernel_that_was_forced_is_the_one_on_the_card(kernel: AttentionKernel, named: str) -> None:
    check_kernel(kernel, SMALL, CARD, torch.bfloat16)
    assert dispatched(kernel, SMALL, CARD, torch.bfloat16) == kernel
    assert dispatched("auto", SMALL, CARD, torch.bfloat16) in ("flash", "cudnn", "efficient")
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        check_kernel(kernel, SMALL, CARD, torch.bfloat16)
        torch.cuda.synchronize()
    assert any(named in event.key.lower() for event in seen.key_averages())


def test_a_kernel_that_cannot_run_in_float32_is_an_error() -> None:
    for kernel in ("flash", "cudnn"):
        with pytest.raises(MachineError, match=rf"{kernel} attention kernel cannot run for torch\.float32"):
            check_kernel(kernel, SMALL, CARD, torch.float32)
        with pytest.raises(MachineError, match=kernel):
            dispatched(kernel, SMALL, CARD, torch.float32)


def _routed(tokens: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    mixture = MIXED.mixture
    assert mixture is not None
    x = torch.randn(tokens, MIXED.width, device=CARD)
    weights, chosen = torch.rand(tokens, mixture.experts, device=CARD).topk(mixture.top_k)
    # One expert that nobody asks for, one that everybody does.
    chosen[chosen == 9] = 0
    chosen[:, 0] = 17
    gate_up = torch.randn(mixture.experts, 2 * mixture.width, MIXED.width, device=CARD) * 0.05
    down = torch.randn(mixture.experts, MIXED.width, mixture.width, device=CARD) * 0.05
    return chosen, x, weights, gate_up, down


def _through(chosen: Tensor, drawn: tuple[Tensor, ...], kind: torch.dtype) -> list[Tensor]:
    x, weights, gate_up, down = leaves = [tensor.detach().clone().requires_grad_() for tensor in drawn]
    way = experts.grouped if kind == torch.bfloat16 else experts.plain
    mixed = way(x.to(kind), chosen, weights, gate_up.to(kind), down.to(kind))
    slopes = torch.randn(mixed.shape, device=CARD, generator=torch.Generator(CARD).manual_seed(1))
    return [mixed, *torch.autograd.grad((mixed * slopes).sum(), leaves)]


def test_grouped_experts_in_bfloat16_are_the_loop_in_float32_forward_and_backward() -> None:
    chosen, *drawn = _routed(tokens=777)
    assert groups(CARD, torch.bfloat16, drawn[2])
    got = _through(chosen, tuple(drawn), torch.bfloat16)
    wanted = _through(chosen, tuple(drawn), torch.float32)
    for rough, exact in zip(got, wanted, strict=True):
        assert _far(rough, exact) < 2e-2
    _, _, _, by_gate_up, by_down = got
    assert not by_gate_up[9].any()
    assert not by_down[9].any()
    again = _through(chosen, tuple(drawn), torch.bfloat16)
    assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))


@pytest.mark.parametrize("shape", [SMALL, MIXED], ids=["dense", "mixture"])
@pytest.mark.parametrize("rows", [0, 1024])
def test_a_step_never_waits_for_the_host(shape: ModelShape, rows: int) -> None:
    model = initialise(Llama(shape, "flash", rows), 0).to(CARD)
    tokens, targets = _text(shape, 4)
    with _no_waiting():
        torch.autograd.backward(_mean(_loss(model, tokens, targets)))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SMALL, MIXED], ids=["dense", "mixture"])
@pytest.mark.parametrize("rows", [0, 2048])
def test_a_compiled_step_is_one_graph_and_computes_the_eager_one(shape: ModelShape, rows: int) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = initialise(Llama(shape, "flash", rows), 0).to(CARD)
    tokens, targets = _text(shape, 4)
    targets[1, 7:] = cross_entropy.IGNORED
    found = []
    compiled = torch.compile(_loss, fullgraph=True, dynamic=False)
    for way in (compiled, _loss):
        loss = way(model, tokens, targets)
        found.append([_mean(loss), *torch.autograd.grad(_mean(loss), list(model.parameters()))])
    distances = [_far(got, wanted) for got, wanted in zip(*found, strict=True)]
    assert distances[0] < 1e-3
    # Of an untrained router two experts may be equally good within rounding: another is chosen, and learns from other tokens.
    assert max(distances) < (0.2 if shape.mixture else 0.05)


def test_logits_in_chunks_are_plain_logits_and_never_there_whole() -> None:
    torch.manual_seed(0)
    rows, words = 16_384, 32_000
    hidden = torch.randn(rows, 320, device=CARD, requires_grad=True)
    table = (0.05 * torch.randn(words, 320, device=CARD)).requires_grad_()
    targets = torch.randint(0, words, (rows,), device=CARD)
    targets[::7] = cross_entropy.IGNORED
    found = []
    for way in (cross_entropy.plain, lambda *given: cross_entropy.chunked(*given, 1024)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            total = way(hidden, table, targets)
        found.append((total.detach(), *torch.autograd.grad(total, (hidden, table))))
        most = torch.cuda.max_memory_allocated() - before
    for got, wanted in zip(*found, strict=True):
        assert _far(got, wanted) < 1e-2
    assert most < rows * words * 2
