"""AdamW with moments in 8 bits: the update by hand, its state's form, and that it learns as AdamW does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from coresident.engines.pool.learning import adamw8bit, checkpoints
from coresident.engines.pool.learning.adamw8bit import AdamW8bit
from coresident.engines.pool.learning.learner import Learner
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.quantised.blockwise import dynamic_map


def trained(
    kind: Callable[..., Any], shapes: list[tuple[int, ...]], steps: int, **values: Any
) -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = kind(parameters, lr=1e-2, **values)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in parameters:
            # All of one magnitude: then every number of a block is held well.
            signs = torch.randn(parameter.shape, generator=generator).sign()
            parameter.grad = signs * (1 + 0.2 * torch.rand(parameter.shape, generator=generator))
        optimizer.step()
    return parameters


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_it_goes_where_adamw_goes(decay: float) -> None:
    shapes = [(64, 100), (5000,), (16, 33)]
    ours = trained(AdamW8bit, shapes, 10, weight_decay=decay)
    theirs = trained(torch.optim.AdamW, shapes, 10, weight_decay=decay)
    start = trained(torch.optim.AdamW, shapes, 0)
    for one, other, first in zip(ours, theirs, start, strict=True):
        assert (one - other).norm() < 0.05 * (other - first).norm()
    # Small ones are not in 8 bits, and are the same.
    assert torch.allclose(ours[2], theirs[2], atol=1e-6)


def test_its_state_is_two_bytes_a_number_and_a_scale_for_256() -> None:
    parameter, small = nn.Parameter(torch.randn(64, 100)), nn.Parameter(torch.randn(30))
    optimizer = AdamW8bit([parameter, small], lr=1e-3)
    parameter.grad, small.grad = torch.randn(64, 100), torch.randn(30)
    optimizer.step()
    kinds = {name: (value.dtype, tuple(value.shape)) for name, value in optimizer.state[parameter].items()}
    assert kinds == {
        "step": (torch.float32, ()),
        "state1": (torch.uint8, (64, 100)),
        "state2": (torch.uint8, (64, 100)),
        "absmax1": (torch.float32, (25,)),
        "absmax2": (torch.float32, (25,)),
    }
    assert set(optimizer.state[small]) == {"step", "exp_avg", "exp_avg_sq"}
    # The first moment after one step is a tenth of the gradient.
    first = adamw8bit.read(
        optimizer.state[parameter]["state1"].view(-1), optimizer.state[parameter]["absmax1"], signed=True
    )
    scale = parameter.grad.view(-1, 256).abs().amax(1, keepdim=True)
    assert ((first - 0.1 * parameter.grad.view(-1)).view(-1, 256).abs() <= 0.1 * 0.01 * scale).all()


def test_blocks_do_not_reach_into_the_next_tensor() -> None:
    """A tensor that ends within a block is held as it would be alone, whatever comes after it."""
    torch.manual_seed(0)
    gradient = torch.randn(4500)
    states = []
    for beside in ([], [torch.full((4500,), 1e6)]):
        parameters = [nn.Parameter(torch.zeros(4500)) for _ in range(1 + len(beside))]
        for parameter, value in zip(parameters, [gradient, *beside], strict=True):
            parameter.grad = value.clone()
        optimizer = AdamW8bit(parameters, lr=1e-3)
        optimizer.step()
        states.append((parameters[0].detach(), optimizer.state[parameters[0]]["absmax1"]))
    assert torch.equal(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])


def test_a_small_negative_moment_keeps_its_sign() -> None:
    moment = torch.full((256,), 1e-9)
    moment[0], moment[1] = 1.0, -1e-9
    state, scales = torch.zeros(256, dtype=torch.uint8), torch.zeros(1)
    adamw8bit.write(moment, state, scales, signed=True)
    held = dynamic_map(signed=True)[state.int()]
    assert held[1] < 0
    assert (held[2:] == 0).all()


def test_many_small_parameters_are_updated_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(64, 100), (70, 64), (5000,), (16, 33), (4096,), (3,)]
    together = trained(AdamW8bit, shapes, 3)
    monkeypatch.setattr(adamw8bit, "CHUNK", 1)
    alone = trained(AdamW8bit, shapes, 3)
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))


def test_a_step_as_bitsandbytes_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(torch, "compile", lambda function=None, **_: function)
    peer = pytest.importorskip("bitsandbytes.backends.triton.kernels_optim")
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(64, 100))
    optimizer = AdamW8bit([parameter], lr=1e-3, weight_decay=0.01)
    theirs = parameter.detach().clone()
    state = adamw8bit.fresh(parameter)
    maps = [dynamic_map(signed=signed) for signed in (True, False)]
    for step in range(1, 6):
        gradient = torch.randn(64, 100)
        parameter.grad = gradient.clone()
        optimizer.step()
        peer.optimizer_update_8bit_blockwise_pytorch(
            theirs, gradient, state["state1"], state["state2"], 0.9, 0.999, 0.0, 0.0, 1e-8, step, 1e-3,
            *maps, state["absmax1"], state["absmax2"], 0.01, 1.0, False, optimizer_name="adam",
        )  # fmt: skip
    # Theirs may lose the sign of a small moment.
    assert torch.allclose(parameter, theirs, atol=5e-5)
    assert (optimizer.state[parameter]["state2"] != state["state2"]).sum() == 0


def test_a_learner_goes_on_from_its_checkpoint_bit_for_bit(
    build: Callable[..., Any], docs_batches: Callable[..., Any], settings: DPO, tmp_path: Path
) -> None:
    wanted = settings.model_copy(update={"optimizer": "adamw8bit", "rank": 64})

    def learner(start: int) -> Learner:
        return Learner(build(wanted), docs_batches(wanted)[start:], wanted)

    whole = learner(0)
    for _ in range(4):
        whole.step()
    first = learner(0)
    first.step()
    first.step()
    kinds = {tuple(sorted(state)) for state in first.optimizer.state.values()}
    assert len(kinds) == 2, "some parameters are in 8 bits and some are not"
    checkpoints.save(tmp_path / "state.safetensors", first, {"optimizer": '"adamw8bit"'})
    second = learner(2)
    checkpoints.restore(tmp_path / "state.safetensors", second, {"optimizer": '"adamw8bit"'})
    second.step()
    second.step()
    assert second.series == whole.series
