"""All adapters of a pack in one block of memory, learner by learner: [N, D], a row for each.

A layer's A [N, r, in] and B [N, out, r] are views of it, and a learner's norm, clipping, optimiser and finished adapter
are its row. Ranks differ: r is the largest, and what lies beyond a learner's own rank is zero and stays zero, since the
gradient of a zero row of A passes through a zero column of B, and the other way round.

`masters` are what is learned, in float32 (float64 for a float64 base). `work` is what products are made with: the same
memory, or a copy in the base's dtype, made anew after each step. Gradients are written into `grads`, once a step each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import nn

from coresident.engines.pool.packed import moments8
from coresident.errors import InternalError

if TYPE_CHECKING:
    from torch import Tensor

# Offsets in elements: a block of moments in 8 bits, and 512 bytes in bfloat16.
_ALIGNED = 256


@dataclass(frozen=True)
class Layer:
    """An adapted layer: its path in the model (`model.layers.0.self_attn.q_proj`), and its widths."""

    path: str
    inputs: int
    outputs: int


@dataclass
class Slot:
    """One layer's part: A [N, r, in] and B [N, out, r] as leaves that autograd knows, and where their gradients go."""

    down: nn.Parameter
    up: nn.Parameter
    for_down: Tensor
    for_up: Tensor


class Arena:
    """The adapters of N learners of these `ranks` over `layers`, all zero; `products` is the dtype of `work`. The optimiser's
    `moments` are two blocks as the masters are, or with `eight` in 8 bits.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        ranks: Sequence[int],
        exact: torch.dtype,
        products: torch.dtype,
        device: torch.device,
        eight: bool = False,
    ) -> None:
        self.layers = tuple(layers)
        self.ranks = list(ranks)
        self.rank = max(ranks)
        self._places, size = _placed(self.layers, self.rank)
        self.masters = torch.zeros(len(ranks), size, dtype=exact, device=device)
        self.moments = (
            moments8.fresh(self.masters) if eight else [torch.zeros_like(self.masters) for _ in range(2)]
        )
        self.tables = moments8.tables(device) if eight else []
        self.work, self.grads, self.slots = self.masters, self.masters, list[Slot]()
        self._products = products
        self._lay()

    @property
    def row(self) -> int:
        """Numbers in a learner's row."""
        return self.masters.shape[1]

    def refresh(self) -> None:
        """Take over into `work` what `masters` hold now."""
        if self.work is not self.masters:
            self.work.copy_(self.masters)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone; every view that was handed out is of the past."""
        self.ranks = [self.ranks[row] for row in rows]
        chosen = torch.tensor(list(rows), device=self.masters.device)
        # One after another, so that no more than one of them is there twice.
        self.masters = self.masters[chosen]
        for number, moment in enumerate(self.moments):
            self.moments[number] = moment[chosen]
        self._lay()

    def parts(self, row: int, block: Tensor | None = None) -> Iterator[tuple[str, Tensor]]:
        """A learner's tensors under PEFT's file names, cut to its rank: views of `masters`, or of a block laid out so."""
        values = (self.masters if block is None else block)[row]
        rank = self.ranks[row]
        for layer, (down, up) in zip(self.layers, self._places, strict=True):
            name = f"base_model.model.{layer.path}"
            a = values[down : down + self.rank * layer.inputs].view(self.rank, layer.inputs)
            b = values[up : up + self.rank * layer.outputs].view(layer.outputs, self.rank)
            yield f"{name}.lora_A.weight", a[:rank]
            yield f"{name}.lora_B.weight", b[:, :rank]

    @torch.no_grad()
    def put(self, row: int, tensors: Mapping[str, Tensor], block: Tensor | None = None) -> None:
        """Give a learner the values of tensors under PEFT's file names."""
        for name, place in self.parts(row, block):
            place.copy_(tensors[name])

    def joined(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The As of layers that read one input as one [N, k r, in], and the place of its gradient."""
        first, inputs = self._places[numbers[0]][0], self.layers[numbers[0]].inputs
        for count, number in enumerate(numbers):
            if (
                self._places[number][0] != first + count * self.rank * inputs
                or self.layers[number].inputs != inputs
            ):
                raise InternalError(
                    f"the adapters of {self.layers[number].path} do not lie beside their neighbours"
                )
        rows = self.rank * len(numbers)
        return _view(self.work, first, rows, inputs), _view(self.grads, first, rows, inputs)

    def beyond(self) -> Tensor:
        """How many numbers beyond the learners' ranks are not zero, [N]."""
        counts = []
        for row in range(len(self.ranks)):
            # One learner's at a time: a mask of all would take a quarter of what is learned.
            own = torch.zeros(self.row, dtype=torch.bool, device=self.masters.device)
            for _, place in self.parts(row, own.expand(len(self.ranks), -1)):
                place.fill_(True)
            counts.append(((self.masters[row] != 0) & ~own).sum())
        return torch.stack(counts)

    def _lay(self) -> None:
        if self._products != self.masters.dtype:
            self.work = self.masters.to(self._products)
        else:
            self.work = self.masters
        self.grads = torch.zeros_like(self.work)
        self.slots = []
        for layer, (down, up) in zip(self.layers, self._places, strict=True):
            a, for_a = (_view(block, down, self.rank, layer.inputs) for block in (self.work, self.grads))
            b, for_b = (_view(block, up, layer.outputs, self.rank) for block in (self.work, self.grads))
            self.slots.append(Slot(nn.Parameter(a), nn.Parameter(b), for_a, for_b))


def _placed(layers: Sequence[Layer], rank: int) -> tuple[list[tuple[int, int]], int]:
    """Where in a row each layer's A and B begin, and a row's length. The As of a module's layers lie side by side, so
    that those that read one input can be one matrix.
    """
    places: dict[int, list[int]] = {number: [] for number in range(len(layers))}
    size = 0
    modules = groupby(range(len(layers)), lambda number: layers[number].path.rpartition(".")[0])
    for numbers in [list(found) for _, found in modules]:
        for number in numbers:
            places[number].append(size)
            size += rank * layers[number].inputs
        size = _aligned(size)
        for number in numbers:
            places[number].append(size)
            size += _aligned(rank * layers[number].outputs)
    return [(down, up) for down, up in places.values()], size


def draw(layers: Sequence[Layer], rank: int, seed: int) -> dict[str, Tensor]:
    """The adapter that a learner alone starts from (`learning.model.attach`), under PEFT's file names, float32."""
    source = torch.Generator().manual_seed(seed)
    found = {}
    for layer in sorted(layers, key=lambda layer: layer.path):
        name = f"base_model.model.{layer.path}"
        a = torch.empty(rank, layer.inputs)
        found[f"{name}.lora_A.weight"] = nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=source)
        found[f"{name}.lora_B.weight"] = torch.zeros(layer.outputs, rank)
    return found


def check_beyond(arena: Arena) -> None:
    """Raise InternalError where something beyond a learner's rank was learned.

    Not of a learner that overflowed: an infinite step makes NaN of the zeros there too, and nothing of it is exported.
    """
    wrong = arena.beyond().tolist()
    for row, count in enumerate(wrong):
        if count and all(torch.isfinite(own).all() for _, own in arena.parts(row)):
            raise InternalError(f"{count} numbers beyond the rank of row {row} of a pack are not zero")


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _view(block: Tensor, start: int, rows: int, columns: int) -> Tensor:
    return block[:, start : start + rows * columns].view(-1, rows, columns)
