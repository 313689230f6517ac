"""Which experts are resident: a pure state machine that the decoder drives online and the simulator's test drives offline.

It knows no slot, no byte and no device. At each step a layer chooses experts. Those resident before the step are hits. The
others are filled one by one in ascending id, each into free room or in the place of a resident that this step does not need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from coresident.engines.moe.policies import Policy
from coresident.errors import InternalError, UserError

Fill = tuple[int, int | None]


@dataclass(frozen=True)
class Step:
    """What one step of one layer found and did: `hits` resident before it, and each (filled expert, victim or None)."""

    hits: int
    fills: tuple[Fill, ...]


@dataclass
class Counts:
    """What a layer's steps added up to. `complete` are steps whose experts were all resident: those stall nothing."""

    steps: int = 0
    complete: int = 0
    accesses: int = 0
    hits: int = 0

    @property
    def misses(self) -> int:
        return self.accesses - self.hits

    def add(self, accesses: int, hits: int) -> None:
        self.steps += 1
        self.complete += accesses == hits
        self.accesses += accesses
        self.hits += hits


@dataclass
class Ahead:
    """What fetching ahead came to, in experts: `used` before they were evicted, `wasted` evicted unused."""

    issued: int = 0
    used: int = 0
    wasted: int = 0


@dataclass
class Cache:
    """Residents of every layer, `capacities[layer]` at most, of `experts` a layer.

    `decoded` and `prefilled` count a layer's decode steps and prefill waves apart. Raises `UserError` for a capacity outside
    1 to `experts`; that it is at least a token's k is the caller's to refuse, who knows k (`require`).
    """

    policy: Policy
    capacities: Sequence[int]
    experts: int
    resident: list[set[int]] = field(init=False)
    decoded: list[Counts] = field(init=False)
    prefilled: list[Counts] = field(init=False)
    ahead: list[Ahead] = field(init=False)
    _unused: list[set[int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for layer, capacity in enumerate(self.capacities):
            if not 1 <= capacity <= self.experts:
                raise UserError(
                    f"layer {layer}: {capacity} slots for {self.experts} experts",
                    f"give 1 to {self.experts} slots a layer",
                )
        layers = len(self.capacities)
        self.resident = [set() for _ in range(layers)]
        self.decoded = [Counts() for _ in range(layers)]
        self.prefilled = [Counts() for _ in range(layers)]
        self.ahead = [Ahead() for _ in range(layers)]
        self._unused = [set() for _ in range(layers)]

    def step(self, layer: int, experts: Sequence[int]) -> Step:
        """A decode step: the distinct `experts` (any order) that `layer` needs now, at most its capacity."""
        return self._step(layer, experts, self.decoded[layer])

    def prefill(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[list[int], Step]]:
        """The waves of a prefill: all that `layer` needs for all rows, ascending, at most a capacity's worth at once.

        Yields each wave and its step when it is asked for, so that a wave may run before the next one evicts it.
        """
        needed = sorted(set(experts))
        capacity = self.capacities[layer]
        for start in range(0, len(needed), capacity):
            wave = needed[start : start + capacity]
            yield wave, self._step(layer, wave, self.prefilled[layer])

    def prefetch(self, layer: int, experts: Sequence[int], keep: Sequence[int] = ()) -> tuple[Fill, ...]:
        """Fill `experts` ahead of need, best first, as far as room not held by them or by `keep` goes.

        Residents are left as they are. What was filled counts as used at the first step that needs it, as wasted if it is
        evicted before. `keep` is what must not go: a step under way, a fill in flight.
        """
        wanted = list(dict.fromkeys(experts))[: self.capacities[layer]]
        pinned = {*wanted, *keep}
        fills: list[Fill] = []
        for expert in wanted:
            if expert in self.resident[layer]:
                continue
            if len(self.resident[layer]) == self.capacities[layer] and self.resident[layer] <= pinned:
                break
            fills.append((expert, self._fill(layer, expert, pinned)))
            self._unused[layer].add(expert)
            self.ahead[layer].issued += 1
        return tuple(fills)

    def _step(self, layer: int, experts: Sequence[int], counts: Counts) -> Step:
        needed = sorted(experts)
        pinned = set(needed)
        if len(pinned) != len(needed) or len(needed) > self.capacities[layer]:
            raise InternalError(
                f"layer {layer}: a step of {len(needed)} experts, {len(pinned)} distinct, in {self.capacities[layer]} slots"
            )
        misses = [expert for expert in needed if expert not in self.resident[layer]]
        hits = len(needed) - len(misses)
        self.ahead[layer].used += len(self._unused[layer] & pinned)
        self._unused[layer] -= pinned
        self.policy.touch(layer, needed)
        fills = tuple((expert, self._fill(layer, expert, pinned)) for expert in misses)
        counts.add(len(needed), hits)
        return Step(hits, fills)

    def _fill(self, layer: int, expert: int, pinned: set[int]) -> int | None:
        resident = self.resident[layer]
        victim: int | None = None
        if len(resident) == self.capacities[layer]:
            victim = self.policy.victim(layer, resident, pinned)
            resident.remove(victim)
            if victim in self._unused[layer]:
                self._unused[layer].remove(victim)
                self.ahead[layer].wasted += 1
        resident.add(expert)
        return victim

    def counted(self) -> tuple[int, int]:
        """Accesses and hits so far of all layers: decode steps, and waves of prefills and of steps too wide for the slots."""
        every = [*self.decoded, *self.prefilled]
        return sum(one.accesses for one in every), sum(one.hits for one in every)

    def clear(self) -> None:
        """Nothing is resident any more; what was counted stays, and so does what the policy has learned."""
        for layer, unused in enumerate(self._unused):
            self.ahead[layer].wasted += len(unused)
            unused.clear()
            self.resident[layer].clear()


def require(capacities: Sequence[int], top_k: int) -> None:
    """Refuse fewer slots than one token needs at once."""
    for layer, capacity in enumerate(capacities):
        if capacity < top_k:
            raise UserError(
                f"layer {layer}: {capacity} slots cannot hold the {top_k} experts that one token needs",
                f"give at least {top_k} slots a layer",
            )
