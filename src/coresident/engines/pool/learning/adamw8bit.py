"""AdamW whose two moments are held in 8 bits, in blocks of 256 numbers: two bytes a parameter instead of eight.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022. The state is that of bitsandbytes' AdamW8bit:
indices into the signed dynamic map (first moment) and the unsigned one (second), a float32 scale for each block of a
tensor, and tensors of fewer than 4096 numbers in float32. It is written in plain PyTorch, the same on a CPU and a GPU:
bitsandbytes is not needed, which starts CUDA where it is imported.

Parameters are taken together, as many as make `CHUNK` numbers, since an adapter has hundreds of small ones and a GPU
does each of these operations in a few microseconds whatever their size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from coresident.engines.pool.quantised.blockwise import SMALLEST, dynamic_map

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 256
LEAST = 4096
CHUNK = 4 << 20
EIGHT, FULL = ("state1", "state2", "absmax1", "absmax2"), ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Rule:
    """One step's constants: learning `rate`, `decay`, betas, eps, and how many steps there have been with this one."""

    rate: float
    decay: float
    betas: tuple[float, float]
    eps: float
    step: int


class AdamW8bit(torch.optim.Optimizer):
    """Decoupled weight decay, bias-corrected moments, as `torch.optim.AdamW`; `weight_decay` and `lr` as there."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        # `fused` says, as AdamW's does, where a step's count is: on the host.
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": False}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply the gradients that are there."""
        if closure is not None:
            raise NotImplementedError("a closure is not called")
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in trained:
                self._count(parameter)
            for chunk in _chunks(trained):
                self._update(chunk, group)

    def _count(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state.update(fresh(parameter))
        state["step"] += 1

    def _update(self, chunk: Sequence[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in chunk]
        rule = Rule(group["lr"], group["weight_decay"], group["betas"], group["eps"], int(states[0]["step"]))
        values = _joined(chunk)
        gradients = _joined([parameter.grad for parameter in chunk if parameter.grad is not None])
        if "state1" in states[0]:
            parts = [torch.cat([_padded(state[name]) for state in states]) for name in EIGHT[:2]]
            scales = [torch.cat([state[name] for state in states]) for name in EIGHT[2:]]
            update(values, gradients, parts[0], parts[1], scales[0], scales[1], rule)
            for name, joined in zip(EIGHT, [*parts, *scales], strict=True):
                _put_back(joined, [state[name] for state in states])
        else:
            moments = [_joined([state[name] for state in states]) for name in FULL]
            _adamw(values, gradients, moments[0], moments[1], rule)
            for name, joined in zip(FULL, moments, strict=True):
                _put_back(joined, [state[name] for state in states])
        _put_back(values, chunk)


def fresh(parameter: Tensor) -> dict[str, Tensor]:
    """A parameter's moments before its first step: of zeros, in 8 bits where it is large enough."""
    if parameter.numel() < LEAST:
        return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in FULL}
    blocks = -(-parameter.numel() // BLOCK)
    made: dict[str, Tensor] = {}
    for number, signed in ((1, True), (2, False)):
        zero = int((dynamic_map(signed=signed) == 0).nonzero()[0])
        made[f"state{number}"] = torch.full_like(parameter, zero, dtype=torch.uint8)
        made[f"absmax{number}"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
    return made


def update(
    values: Tensor,
    gradients: Tensor,
    state1: Tensor,
    state2: Tensor,
    absmax1: Tensor,
    absmax2: Tensor,
    rule: Rule,
) -> None:
    """One step in place: float32 `values` and `gradients` [n], uint8 states [n], float32 scales [n / 256]; n is a
    multiple of 256.
    """
    first, second = read(state1, absmax1, signed=True), read(state2, absmax2, signed=False)
    _adamw(values, gradients, first, second, rule)
    write(first, state1, absmax1, signed=True)
    write(second, state2, absmax2, signed=False)


def read(state: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """A moment, float32 [n], from its 8-bit state [n] (n a multiple of 256) and the scales of its blocks."""
    found = dynamic_map(signed=signed).to(state.device)[state.int()]
    found.view(-1, BLOCK).mul_(scales[:, None])
    return found


def write(moment: Tensor, state: Tensor, scales: Tensor, *, signed: bool) -> None:
    """Put a moment into its 8-bit state, in place: the nearest value of each number, but never none for a small negative
    one, which would change its sign.
    """
    table = dynamic_map(signed=signed).to(state.device)
    blocks = moment.view(-1, BLOCK)
    torch.amax(blocks.abs(), dim=1, out=scales)
    scaled = (blocks * (1.0 / scales.clamp(min=SMALLEST))[:, None]).view(-1)
    indices = torch.bucketize(scaled, (table[:-1] + table[1:]) / 2, out_int32=True)
    if signed:
        indices -= ((table[indices] == 0) & (moment < 0)).int()
    state.copy_(indices)


def _adamw(values: Tensor, gradients: Tensor, first: Tensor, second: Tensor, rule: Rule) -> None:
    beta1, beta2 = rule.betas
    first.mul_(beta1).add_(gradients, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    if rule.decay:
        values.mul_(1 - rule.rate * rule.decay)
    below = second.sqrt().div_(math.sqrt(1 - beta2**rule.step)).add_(rule.eps)
    values.addcdiv_(first, below, value=-rule.rate / (1 - beta1**rule.step))


def _chunks(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters whose moments are held alike, as many as make a chunk."""
    for eight in (True, False):
        chunk: list[Tensor] = []
        size = 0
        for parameter in parameters:
            if (parameter.numel() >= LEAST) is not eight:
                continue
            if chunk and size + parameter.numel() > CHUNK:
                yield chunk
                chunk, size = [], 0
            chunk.append(parameter)
            size += parameter.numel()
        if chunk:
            yield chunk


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([_padded(tensor).float() for tensor in tensors])


def _padded(tensor: Tensor) -> Tensor:
    """Flat, with zeros up to a whole number of blocks: blocks do not reach into the next tensor."""
    flat = tensor.reshape(-1)
    missing = -len(flat) % BLOCK
    return F.pad(flat, (0, missing)) if missing else flat


def _put_back(joined: Tensor, tensors: Sequence[Tensor]) -> None:
    # Scales are one a block, and whole already.
    sizes = [tensor.numel() for tensor in tensors]
    held = sizes if sum(sizes) == len(joined) else [-(-size // BLOCK) * BLOCK for size in sizes]
    parts = [
        part[:size].view(tensor.shape)
        for part, size, tensor in zip(torch.split(joined, held), sizes, tensors, strict=True)
    ]
    torch._foreach_copy_(list(tensors), parts)
