"""Residency without the host: kernels decide what a step evicts and fetch what it misses from pinned memory.

So a token of a model that is not all resident is one graph, too. The books, who is resident and what the policy has counted,
are on the device meanwhile: `take` brings the host's there, `settle` brings them back. Both decide alike, expert by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from coresident.engines.moe.cache import Cache
from coresident.engines.moe.policies import LFU, LRU, DecayingLFU, Policy, Ranked, Static
from coresident.engines.moe.residency import kernels
from coresident.engines.moe.residency.slots import Slots
from coresident.engines.moe.tiers.host import Arena, Host

# What `kernels.admit` calls the ways to rank.
_RULES: dict[type, int] = {LRU: 0, LFU: 1, DecayingLFU: 1, Static: 2}
# Words of a record that one program brings at a time, and programs a multiprocessor.
_WORDS, _PROGRAMS = 4096, 2


def possible(policy: Policy, host: Host, device: torch.device) -> bool:
    """Whether kernels can do it: every expert is in memory that they read, and they know how the policy ranks."""
    reached = isinstance(host, Arena) and (device.type == "cpu" or host.memory.pinned)
    return reached and type(policy) in _RULES


def fetch(records: Tensor, arena: Tensor, fills: Tensor, filled: Tensor, first: int) -> None:
    """Issue the filling of `arena` [slots, size]: of each of `filled` [1] (expert, slot) in `fills` [E, 2], the slot from the row
    first + expert of `records` [rows, size], which is pinned memory. Both are uint8 of whole words.
    """
    programs = 2
    if arena.device.type == "cuda":
        programs = _PROGRAMS * torch.cuda.get_device_properties(arena.device).multi_processor_count
    words = records.view(torch.int32)
    kernels.fetch[(programs,)](
        words, arena.view(torch.int32), fills, filled, first, words.shape[1], BLOCK=_WORDS, num_warps=8
    )


@dataclass
class Unattended:
    """The layers `layers` of `cache` on the device; the others are left alone. Nothing may be fetched ahead in them."""

    cache: Cache
    slots: Slots
    host: Arena
    layers: Sequence[int]
    _rule: int = field(init=False)
    # By layer: priorities [L, E], steps [L], slots that are free [L, C] and how many [L], counts [L, 4] of steps, of those that
    # missed nothing, of accesses and of hits.
    _priority: Tensor = field(init=False)
    _steps: Tensor = field(init=False)
    _free: Tensor = field(init=False)
    _left: Tensor = field(init=False)
    _counts: Tensor = field(init=False)
    # Of the step under way: (expert, slot) of each fill, and how many.
    _fills: Tensor = field(init=False)
    _filled: Tensor = field(init=False)
    _factor: Tensor = field(init=False)
    _awake: Tensor = field(init=False)

    def __post_init__(self) -> None:
        device, experts, layers = self.slots.device, self.cache.experts, len(self.cache.capacities)
        policy = self._policy

        def room(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._rule = _RULES[type(policy)]
        self._priority = room(layers, experts, dtype=torch.float64)
        self._steps = room(layers, dtype=torch.float64)
        self._free, self._left = room(layers, experts, dtype=torch.int32), room(layers, dtype=torch.int32)
        self._counts = room(layers, 4, dtype=torch.int64)
        self._fills, self._filled = room(experts, 2, dtype=torch.int32), room(1, dtype=torch.int32)
        # In memory, since kernels take numbers in float32.
        self._factor = torch.full((1,), policy.factor, dtype=torch.float64, device=device)
        self._awake = torch.ones(1, dtype=torch.int32, device=device)

    def step(self, layer: int, chosen: Tensor) -> None:
        """Issue a decode step of `layer` over the experts in chosen [pairs] of int32: afterwards the map has them all."""
        experts = self.cache.experts
        kernels.admit[(1,)](
            chosen, self.slots.map[layer], self._priority[layer], self._steps[layer], self._factor, self._free[layer],
            self._left[layer], self._counts[layer], self._fills, self._filled, self._awake, len(chosen), experts,
            RULE=self._rule, BLOCK=triton.next_power_of_2(experts), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        fetch(self.host.memory.records, self.slots.arena, self._fills, self._filled, layer * experts)

    def sleep(self) -> None:
        """Steps issued from now on choose and count nothing: for those that only warm kernels up."""
        self._awake.zero_()

    def wake(self) -> None:
        """Steps count again."""
        self._awake.fill_(1)

    def take(self) -> None:
        """The host's books become the device's."""
        self.slots.show()
        policy, layers = self._policy, len(self.cache.capacities)
        free = torch.zeros(layers, self.cache.experts, dtype=torch.int32)
        for layer in self.layers:
            spare = self.slots.free[layer]
            free[layer, : len(spare)] = torch.tensor(spare, dtype=torch.int32)
        self._free.copy_(free)
        self._left.copy_(torch.tensor([len(spare) for spare in self.slots.free], dtype=torch.int32))
        self._priority.copy_(torch.tensor(policy.priority, dtype=torch.float64))
        if isinstance(policy, LRU):
            self._steps.copy_(torch.tensor(policy.steps, dtype=torch.float64))
        self._counts.zero_()

    def settle(self) -> None:
        """The device's books become the host's; waits for all steps issued. The device's stay as they are."""
        policy = self._policy
        counts, where, priority = self._counts.tolist(), self.slots.map.tolist(), self._priority.tolist()
        steps, free, left = self._steps.tolist(), self._free.tolist(), self._left.tolist()
        for layer in self.layers:
            counted = self.cache.decoded[layer]
            taken, complete, accesses, hits = counts[layer]
            counted.steps += taken
            counted.complete += complete
            counted.accesses += accesses
            counted.hits += hits
            self.slots.installs += accesses - hits
            self.host.served.from_memory += accesses - hits
            self.cache.resident[layer] = {expert for expert, slot in enumerate(where[layer]) if slot >= 0}
            self.slots.placed(layer, where[layer], free[layer][: left[layer]])
            policy.priority[layer] = priority[layer]
            if isinstance(policy, LRU):
                policy.steps[layer] = int(steps[layer])
        self._counts.zero_()

    @property
    def _policy(self) -> Ranked:
        assert isinstance(self.cache.policy, Ranked)
        return self.cache.policy
