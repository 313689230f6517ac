"""Run by `test_unattended.py` in a process of its own, where Triton interprets kernels on the CPU.

Drives a cache by its kernels and another by the host through the same drawn steps, and prints a line of JSON: by policy, what of
their books differs, and `records` where a slot does not hold its expert's. `sys.argv[1]` names a fault to be planted, or none.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch

from coresident.engines.moe.cache import Cache
from coresident.engines.moe.layout.record import RecordFormat
from coresident.engines.moe.policies import NAMES, policy
from coresident.engines.moe.residency import unattended
from coresident.engines.moe.residency.slots import Slots
from coresident.engines.moe.residency.unattended import Unattended
from coresident.engines.moe.tiers.host import Arena
from coresident.engines.moe.tiers.memory import allocate

LAYERS, EXPERTS, TOP_K = 3, 7, 2
# The last is complete and filled beforehand: the kernels leave it alone.
CAPACITIES = (3, 4, 7)
STEPS, ASKED = 25, (3, 10, 24)
FORM = RecordFormat(64, 48, "F32")
POPULARITY = [[((3 * expert) % 5) / 4 for expert in range(EXPERTS)] for _ in range(LAYERS)]


def made(name: str, arena: Arena) -> tuple[Cache, Slots]:
    """A cache and slots, the last layer filled."""
    cache = Cache(policy(name, LAYERS, EXPERTS, POPULARITY, half_life=3.0), CAPACITIES, EXPERTS)
    slots = Slots(FORM, CAPACITIES, EXPERTS, torch.device("cpu"))
    slots.fill(2, cache.prefetch(2, range(EXPERTS)), arena)
    # As a prefill leaves it: something is resident, and something chosen before.
    for _, step in cache.prefill(0, [5, 6]):
        slots.fill(0, step.fills, arena)
    return cache, slots


def differences(name: str, arena: Arena, fault: str) -> list[str]:
    """What differs after some of the steps, by name."""
    (hosts, placed), (cache, slots) = made(name, arena), made(name, arena)
    kernels, source, found = Unattended(cache, slots, arena, (0, 1)), random.Random(name), []
    if fault == "rule":
        kernels._rule = (kernels._rule + 1) % 3
    if fault == "asleep":
        kernels.sleep()
    kernels.take()
    for number in range(STEPS):
        for layer in (0, 1):
            # Two rows sometimes choose the same expert.
            chosen = source.sample(range(EXPERTS), TOP_K) if number % 5 else [source.randrange(EXPERTS)] * 2
            step = hosts.step(layer, sorted(set(chosen)))
            placed.fill(layer, step.fills, arena)
            if number == 5 and fault == "":
                # A step that only warms up changes nothing.
                kernels.sleep()
                kernels.step(layer, torch.tensor([0, 1], dtype=torch.int32))
                kernels.wake()
            kernels.step(layer, torch.tensor(chosen, dtype=torch.int32))
        if number in ASKED:
            kernels.settle()
            pairs: dict[str, tuple[Any, Any]] = {
                "counts": (hosts.decoded, cache.decoded),
                "residents": (hosts.resident, cache.resident),
                "priorities": (hosts.policy.priority, cache.policy.priority),  # type: ignore[attr-defined]
                "slots": (placed.slot, slots.slot),
                "free": (placed.free, slots.free),
                "installs": (placed.installs, slots.installs),
                "map": (placed.slot, slots.map.tolist()),
            }
            found += [what for what, (one, other) in pairs.items() if one != other]
            for layer in range(LAYERS):
                for expert in cache.resident[layer]:
                    record = slots.arena[slots.slot[layer][expert]]
                    if not bool((record == layer * EXPERTS + expert + 1).all()):
                        found.append("records")
            if number == ASKED[1]:
                kernels.take()
    return sorted(set(found))


def main() -> None:
    """Compare."""
    torch.set_num_threads(1)
    fault = sys.argv[1] if len(sys.argv) > 1 else ""
    memory = allocate(LAYERS * EXPERTS, FORM.size, pin=False)
    for number in range(LAYERS * EXPERTS):
        memory.records[number] = number + 1
    keys = {(layer, expert): layer * EXPERTS + expert for layer in range(LAYERS) for expert in range(EXPERTS)}
    if fault == "record":
        fetch = unattended.kernels.fetch
        unattended.kernels.fetch = type(
            "Neighbour",
            (),
            {"__getitem__": lambda _, grid: lambda *a, **k: fetch[grid](*a[:4], a[4] + 1, *a[5:], **k)},
        )()
    names = NAMES if not fault else ("lfu-decay",)
    print(json.dumps({name: differences(name, Arena(memory, keys), fault) for name in names}))


main()
