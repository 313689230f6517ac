"""The experts of a layer, run: each row's are added up in the router's order, whoever was resident and whatever came when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from coresident.engines.moe.cache import Cache
from coresident.engines.moe.layout.record import RecordFormat, swiglu
from coresident.engines.moe.models.checkpoint import open_checkpoint
from coresident.engines.moe.models.origins import Files
from coresident.engines.moe.policies import policy
from coresident.engines.moe.residency.clock import Clock
from coresident.engines.moe.residency.experts import Experts
from coresident.engines.moe.residency.slots import Slots
from coresident.engines.moe.tiers.host import arena
from coresident.engines.moe.tiers.readers import OriginReader

FORM = RecordFormat(64, 96, "F32")


@pytest.mark.parametrize("prefill", [True, False])
def test_a_row_s_experts_are_added_in_the_router_s_order(prefill: bool, saved: Callable[[str], Path]) -> None:
    origin = Files(open_checkpoint(saved("olmoe")))
    slots = Slots(FORM, (5,) * 3, 8, torch.device("cpu"))
    host = arena(OriginReader(origin, FORM), 3, 8, pin=False)
    experts = Experts(Cache(policy("lru", 3, 8), (5,) * 3, 8), slots, host, torch.float32, Clock())
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    orders = [[6, 1, 4, 0, 3], [0, 1, 3, 4, 6]]
    weights = torch.tensor([[1.0, 1e-3, 3e3, 7.0, 0.1]])
    # Half of them are there already.
    experts.run(1, x, torch.tensor([orders[1][:3]]), weights[:, :3], prefill)
    for order, scales in ((orders[0], weights), (orders[1], weights[:, [3, 1, 4, 2, 0]])):
        parts = []
        for expert in order:
            held = FORM.stored(host.memory.records).expert(host.keys[1, expert], torch.float32)
            parts.append(swiglu(x, held)[0])
        wanted = (torch.stack(parts) * scales[0, :, None])[None].sum(1)
        assert torch.equal(experts.run(1, x, torch.tensor([order]), scales, prefill), wanted)
        swapped = (torch.stack(parts[::-1]) * scales[0].flip(0)[:, None])[None].sum(1)
        assert not torch.equal(wanted, swapped)
