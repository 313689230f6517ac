"""Which expert a full layer gives up: the rules that the decoder follows online and the simulator offline.

Every rule keeps one priority an expert and layer and gives up the lowest, the lowest id among equals, so that two runs over
the same routing evict the same experts, and so that evicting several one by one is evicting the several lowest at once
(which is how the simulator does it). Only what a step chooses moves an expert's place relative to others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal, Protocol, get_args

from coresident.errors import InternalError, UserError, nearest

Name = Literal["lru", "lfu", "lfu-decay", "static"]
NAMES: tuple[Name, ...] = get_args(Name)
HALF_LIFE = 64.0


class Policy(Protocol):
    """What a cache asks: it tells what each step chose, and asks what to give up."""

    def touch(self, layer: int, experts: Sequence[int]) -> None:
        """A step of `layer` chose `experts` (ascending ids). Not called for what is only fetched ahead."""

    def victim(self, layer: int, resident: Collection[int], pinned: Collection[int]) -> int:
        """The resident expert to give up, never one of `pinned`."""


class Ranked:
    """Gives up the lowest priority, the lowest id among equals. Priorities are multiplied by `factor` at every step."""

    factor = 1.0

    def __init__(self, layers: int, experts: int) -> None:
        self.priority: list[list[float]] = [[0.0] * experts for _ in range(layers)]

    def victim(self, layer: int, resident: Collection[int], pinned: Collection[int]) -> int:
        priority = self.priority[layer]
        best = -1
        for expert in resident:
            if expert in pinned:
                continue
            if best < 0 or (priority[expert], expert) < (priority[best], best):
                best = expert
        if best < 0:
            raise InternalError(f"layer {layer}: all {len(resident)} resident experts are pinned")
        return best


class LRU(Ranked):
    """Least recently used: the priority is the layer's step at which it was last chosen."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__(layers, experts)
        self.steps = [0] * layers

    def touch(self, layer: int, experts: Sequence[int]) -> None:
        self.steps[layer] += 1
        for expert in experts:
            self.priority[layer][expert] = float(self.steps[layer])


class LFU(Ranked):
    """Least frequently used: the priority is how often it was chosen, counted on while it is not resident."""

    def touch(self, layer: int, experts: Sequence[int]) -> None:
        for expert in experts:
            self.priority[layer][expert] += 1.0


class DecayingLFU(Ranked):
    """LFU whose counts halve every `half_life` steps of the layer, so that an old habit is given up."""

    def __init__(self, layers: int, experts: int, half_life: float = HALF_LIFE) -> None:
        super().__init__(layers, experts)
        self.factor = decay_factor(half_life)

    def touch(self, layer: int, experts: Sequence[int]) -> None:
        # Every count is multiplied at every step, never a power at once: the simulator then rounds alike.
        decayed = [count * self.factor for count in self.priority[layer]]
        for expert in experts:
            decayed[expert] += 1.0
        self.priority[layer] = decayed


class Static(Ranked):
    """A fixed popularity: the popular stay, a rarer one only passes through the slots that the least popular hold."""

    def __init__(self, popularity: Sequence[Sequence[float]]) -> None:
        super().__init__(0, 0)
        self.priority = [[float(score) for score in row] for row in popularity]

    def touch(self, layer: int, experts: Sequence[int]) -> None:
        """Nothing that happens changes a static order."""


def decay_factor(half_life: float) -> float:
    """What a count is multiplied by at each step."""
    if not half_life > 0:
        raise UserError(f"a half-life of {half_life:g} steps is no time", "give a number above 0")
    return float(0.5 ** (1.0 / half_life))


def policy(
    name: str,
    layers: int,
    experts: int,
    popularity: Sequence[Sequence[float]] | None = None,
    half_life: float = HALF_LIFE,
) -> Policy:
    """The policy called `name`: lru, lfu, lfu-decay or static (`popularity` [layers][experts], more is kept longer)."""
    if name == "lru":
        return LRU(layers, experts)
    if name == "lfu":
        return LFU(layers, experts)
    if name == "lfu-decay":
        return DecayingLFU(layers, experts, half_life)
    if name == "static":
        if popularity is None:
            raise UserError(
                "policy static needs each expert's popularity", "give traces to count it from, or choose lru"
            )
        if len(popularity) != layers or any(len(row) != experts for row in popularity):
            raise UserError(
                f"the popularity is not one number for each of {layers} layers x {experts} experts",
                "count it on traces of this model",
            )
        if any(math.isnan(score) for row in popularity for score in row):
            raise UserError("an expert's popularity is no number", "count it on traces of this model again")
        return Static(popularity)
    raise UserError(f"unknown policy {name!r}", nearest(name, NAMES))
