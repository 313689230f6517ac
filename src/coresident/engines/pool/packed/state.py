"""One learner of a pack as it is between two steps: what its checkpoint holds.

Its tensors have the names that a learner alone gives them, so that either goes on from the other's checkpoint. Moments in 8 bits
are the exception: a pack cuts a learner's whole row into blocks, where a learner alone cuts each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from coresident.engines.pool.packed.arena import Arena

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class State:
    """`tensors` on the host by their names in a checkpoint, and the `series` until now."""

    tensors: Mapping[str, Tensor]
    series: Mapping[str, list[float]]

    @property
    def steps(self) -> int:
        """How many steps are done."""
        return len(self.series["loss"])

    @classmethod
    def of(cls, arena: Arena, row: int, series: Mapping[str, list[float]]) -> State:
        """The learner in `row`; waits for the device."""
        tensors = {f"adapter.{_inside(name)}": value for name, value in arena.parts(row)}
        if len(arena.moments) == len(_MOMENTS):
            count = torch.tensor(float(len(series["loss"])))
            for part, moment in zip(_MOMENTS, arena.moments, strict=True):
                for name, value in arena.parts(row, moment):
                    tensors[f"optimizer.{part}.{_inside(name)}"] = value
                    tensors[f"optimizer.step.{_inside(name)}"] = count
        else:
            tensors |= {_of_row(number): moment[row] for number, moment in enumerate(arena.moments)}
        host = {name: value.to("cpu", copy=True).contiguous() for name, value in tensors.items()}
        return cls(host, {name: list(values) for name, values in series.items()})

    def put(self, arena: Arena, row: int) -> None:
        """Make the learner in `row` what this is."""
        arena.put(row, self._named("adapter"))
        if len(arena.moments) == len(_MOMENTS):
            for part, moment in zip(_MOMENTS, arena.moments, strict=True):
                arena.put(row, self._named(f"optimizer.{part}"), moment)
        else:
            for number, moment in enumerate(arena.moments):
                moment[row].copy_(self.tensors[_of_row(number)])

    def _named(self, kind: str) -> dict[str, Tensor]:
        return {
            _outside(name.removeprefix(f"{kind}.")): value
            for name, value in self.tensors.items()
            if name.startswith(f"{kind}.")
        }


def _of_row(number: int) -> str:
    return f"optimizer.row.{number}"


def _inside(name: str) -> str:
    """A parameter's name in a model that PEFT wrapped, from its name in PEFT's files."""
    return name.removesuffix(".weight") + ".default.weight"


def _outside(name: str) -> str:
    return name.removesuffix(".default.weight") + ".weight"
