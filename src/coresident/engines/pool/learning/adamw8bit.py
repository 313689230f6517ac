"""AdamW whose two moments are held in 8 bits, in blocks of 256 numbers: two bytes a parameter instead of eight.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022. The state is that of bitsandbytes' AdamW8bit:
indices into the signed dynamic map (first moment) and the unsigned one (second), a float32 scale for each block of a
tensor, and tensors of fewer than 4096 numbers in float32. It is written in plain PyTorch, the same on a CPU and a GPU:
bitsandbytes is not needed, which starts CUDA where it is imported.

Parameters are taken together, as many as make `CHUNK` numbers, since an adapter has hundreds of small ones and a GPU
does each of these operations in a few microseconds whatever their size. A chunk's numbers are there four times at most
in 32 bits, at a time when all gradients are there too: buffers are used again or gone before the next (`fit.step` has
them written down).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from coresident.engines.pool.learning.chunks import CHUNK, together
from coresident.engines.pool.quantised.blockwise import SMALLEST, dynamic_map

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 256
LEAST = 4096
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
        gradients = _joined([parameter.grad for parameter in chunk if parameter.grad is not None])
        if "state1" not in states[0]:
            moments = [_joined([state[name] for state in states]) for name in FULL]
            _move(chunk, gradients, moments[0], moments[1], rule)
            for name, joined in zip(FULL, moments, strict=True):
                _put_back(joined, [state[name] for state in states])
            return
        held = [torch.cat([_padded(state[name]) for state in states]) for name in EIGHT[:2]]
        held += [torch.cat([state[name] for state in states]) for name in EIGHT[2:]]
        first, second = read(held[0], held[2], signed=True), read(held[1], held[3], signed=False)
        _move(chunk, gradients, first, second, rule)
        del gradients
        write(second, held[1], held[3], signed=False)
        del second
        write(first, held[0], held[2], signed=True)
        for name, joined in zip(EIGHT, held, strict=True):
            _put_back(joined, [state[name] for state in states])


def fresh(parameter: Tensor) -> dict[str, Tensor]:
    """A parameter's moments before its first step: of zeros, in 8 bits where it is large enough."""
    if parameter.numel() < LEAST:
        return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in FULL}
    blocks = -(-parameter.numel() // BLOCK)
    made: dict[str, Tensor] = {}
    for number, signed in ((1, True), (2, False)):
        made[f"state{number}"] = torch.full_like(parameter, _zero(signed), dtype=torch.uint8)
        made[f"absmax{number}"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
    return made


def read(state: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """A moment, float32 [n], from its 8-bit state [n] (n a multiple of 256) and the scales of its blocks."""
    table, _ = _table(state.device, signed)
    # Indexing by brackets would make a copy of the indices in 64 bits.
    found = table.index_select(0, state.int())
    found.view(-1, BLOCK).mul_(scales[:, None])
    return found


def write(moment: Tensor, state: Tensor, scales: Tensor, *, signed: bool) -> None:
    """Put a moment into its 8-bit state, in place: the nearest value of each number, but never none for a small negative
    one, which would change its sign.
    """
    _, edges = _table(state.device, signed)
    blocks = moment.view(-1, BLOCK)
    scaled = blocks.abs()
    torch.amax(scaled, dim=1, out=scales)
    torch.mul(blocks, (1.0 / scales.clamp(min=SMALLEST))[:, None], out=scaled)
    state.copy_(torch.bucketize(scaled.view(-1), edges, out_int32=True))
    del scaled
    if signed:
        lost = (state == _zero(signed)).logical_and_(moment < 0)
        state.sub_(lost.view(torch.uint8))


@cache
def _table(device: torch.device, signed: bool) -> tuple[Tensor, Tensor]:
    """The values of the map, and the edges between them: on the device once, as each copy there would be waited for."""
    table = dynamic_map(signed=signed).to(device)
    return table, (table[:-1] + table[1:]) / 2


@cache
def _zero(signed: bool) -> int:
    """The index of no moment at all."""
    return int((dynamic_map(signed=signed) == 0).nonzero()[0])


def _move(parameters: Sequence[Tensor], gradients: Tensor, first: Tensor, second: Tensor, rule: Rule) -> None:
    """AdamW's step: new moments and parameters, in place; all flat float32 [n], as `_joined` has them. What is in
    `gradients` is lost.
    """
    beta1, beta2 = rule.betas
    first.mul_(beta1).add_(gradients, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    below = torch.sqrt(second, out=gradients).div_(math.sqrt(1 - beta2**rule.step)).add_(rule.eps)
    values = _joined(parameters)
    if rule.decay:
        values.mul_(1 - rule.rate * rule.decay)
    values.addcdiv_(first, below, value=-rule.rate / (1 - beta1**rule.step))
    _put_back(values, parameters)


def _chunks(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters whose moments are held alike, as many as make a chunk."""
    for eight in (True, False):
        alike = [parameter for parameter in parameters if (parameter.numel() >= LEAST) is eight]
        for chunk in together([parameter.numel() for parameter in alike], CHUNK):
            yield [alike[number] for number in chunk]


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
