"""One update of the weights: a batch in microbatches, whose gradients add up to the gradient of the whole.

Each microbatch's loss is its sum over real targets divided by those of the whole update, which are counted on the host. (The
mean of the microbatches' means would weigh a target by how few others share its microbatch.) Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from coresident.engines.pretrain.optimiser import ClippedAdamW
from coresident.engines.pretrain.parameters import Runtime

if TYPE_CHECKING:
    from torch import Tensor

    from coresident.model.llama import Llama

# tokens [n, T] and targets [n, T] to the summed cross-entropy and the auxiliary loss.
LossFunction = Callable[["Tensor", "Tensor"], "tuple[Tensor, Tensor]"]


@dataclass(frozen=True)
class Microbatch:
    """`tokens` and `targets` [n, T] of int64 on the device (-100: no target), and how many targets are `valid`."""

    tokens: Tensor
    targets: Tensor
    valid: int


class Losses:
    """The model's loss under the precision that was asked for: compiled for batches of `full` sequences, eager for all
    others, so that nothing is ever compiled twice for a batch that is short.
    """

    def __init__(self, model: Llama, runtime: Runtime, dtype: torch.dtype, full: frozenset[int]) -> None:
        device = model.embedding.device
        self.compiles = device.type == "cuda" if runtime.compile is None else runtime.compile
        self._full = full
        self.captures = self.compiles and runtime.compile_mode != "default" and device.type == "cuda"

        def loss(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
                found = model.loss(tokens, targets)
            return found.cross_entropy, found.auxiliary

        self.compiled_calls = 0
        self.eager: LossFunction = loss
        self._compiled: LossFunction = loss
        if self.compiles:
            self._compiled = torch.compile(loss, fullgraph=True, dynamic=False, mode=runtime.compile_mode)

    def __call__(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if not self.compiles or len(tokens) not in self._full:
            return self.eager(tokens, targets)
        self.compiled_calls += 1
        if self.captures:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return self._compiled(tokens, targets)


def accumulate(losses: LossFunction, microbatches: list[Microbatch]) -> tuple[Tensor, Tensor]:
    """Add to the parameters' gradients that of the mean loss over all targets of `microbatches`.

    Returns that mean cross-entropy and the auxiliary loss (a microbatch's weighs by its share of the targets), both float64
    scalars on the device.
    """
    total = sum(one.valid for one in microbatches)
    device = microbatches[0].tokens.device
    loss = torch.zeros((), dtype=torch.float64, device=device)
    beside = torch.zeros((), dtype=torch.float64, device=device)
    for one in microbatches:
        cross_entropy, auxiliary = losses(one.tokens, one.targets)
        share = one.valid / total
        (cross_entropy / total + auxiliary * share).backward()  # type: ignore[no-untyped-call]
        loss += cross_entropy.detach().double() / total
        beside += auxiliary.detach().double() * share
    return loss, beside


@dataclass(frozen=True)
class Figures:
    """What an update gives, on the device: mean `loss`, `auxiliary` loss, and the gradient's `norm` before clipping."""

    loss: Tensor
    auxiliary: Tensor
    norm: Tensor

    def stacked(self) -> Tensor:
        """All of them, float64 [3]."""
        return torch.stack([self.loss, self.auxiliary, self.norm.double()])


def update(
    losses: LossFunction, optimiser: ClippedAdamW, microbatches: list[Microbatch], number: int, rate: float
) -> Figures:
    """Do update `number` (from 1) at this learning rate."""
    loss, auxiliary = accumulate(losses, microbatches)
    return Figures(loss, auxiliary, optimiser.step(number, rate, loss))
