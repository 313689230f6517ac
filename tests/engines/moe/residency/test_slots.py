"""Slots: one copy a record, a map that the device can follow, and no expert in two places or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from coresident.engines.moe.cache import Cache
from coresident.engines.moe.layout.record import RecordFormat
from coresident.engines.moe.models.checkpoint import open_checkpoint
from coresident.engines.moe.models.origins import Files
from coresident.engines.moe.policies import policy
from coresident.engines.moe.residency.slots import Slots
from coresident.engines.moe.tiers.host import Arena, arena
from coresident.engines.moe.tiers.readers import OriginReader
from coresident.errors import InternalError, MachineError

FORM = RecordFormat(64, 96, "F32")


@pytest.fixture
def host(saved: Callable[[str], Path]) -> Arena:
    """All records of the tiny OLMoE."""
    origin = Files(open_checkpoint(saved("olmoe")))
    return arena(OriginReader(origin, FORM), 3, 8, pin=False)


@pytest.fixture
def slots() -> Slots:
    """Two, three and eight slots."""
    return Slots(FORM, (2, 3, 8), 8, torch.device("cpu"))


def test_after_any_steps_map_slots_and_cache_agree(host: Arena, slots: Slots) -> None:
    cache = Cache(policy("lru", 3, 8), (2, 3, 8), 8)
    generator = torch.Generator().manual_seed(0)
    filled = 0
    for number in range(200):
        layer = number % 3
        step = cache.step(layer, torch.randperm(8, generator=generator)[:2].tolist())
        slots.fill(layer, step.fills, host, show=number % 2 == 0)
        filled += len(step.fills)
        slots.show()
        placed = slots.map[layer].tolist()
        assert {expert for expert in range(8) if placed[expert] >= 0} == cache.resident[layer]
        used = [slot for slot in slots.map.flatten().tolist() if slot >= 0]
        assert len(used) == len(set(used))
        for expert in cache.resident[layer]:
            wanted = FORM.stored(host.memory.records).expert(host.keys[layer, expert], torch.float32)
            assert torch.equal(slots.expert(layer, expert, torch.float32).gate_up, wanted.gate_up)
            assert torch.equal(slots.stored.down[placed[expert]], wanted.down)
    assert slots.installs == filled


def test_layers_keep_to_their_own_slots(host: Arena, slots: Slots) -> None:
    slots.fill(0, [(5, None), (6, None)], host)
    slots.fill(1, [(5, None), (6, None), (7, None)], host)
    slots.show()
    assert sorted(slot for slot in slots.map[0].tolist() if slot >= 0) == [0, 1]
    assert sorted(slot for slot in slots.map[1].tolist() if slot >= 0) == [2, 3, 4]
    assert slots.nbytes == 13 * FORM.size


@pytest.mark.parametrize("fill", [(5, 3), (4, None)], ids=["a victim that is absent", "twice the same"])
def test_a_fill_that_makes_no_sense_is_our_own_bug(
    fill: tuple[int, int | None], host: Arena, slots: Slots
) -> None:
    slots.fill(1, [(4, None)], host)
    with pytest.raises(InternalError):
        slots.fill(1, [fill], host)


def test_more_slots_than_there_is_memory_for_are_told_as_slots() -> None:
    """On a CPU, too, where a smaller --host-memory would not help."""
    with pytest.raises(MachineError, match="1000000000 slots of 73,728 bytes do not fit") as told:
        Slots(FORM, (10**9,), 10**9, torch.device("cpu"))
    assert "give fewer --slots" in str(told.value)
