"""What the terms of a token's bound cost by themselves: one router decision read back, one record brought from host memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from coresident.engines.moe.assemble import Engine
from coresident.engines.moe.tiers.host import Arena


def sync_seconds(engine: Engine, rounds: int = 20, times: int = 20) -> float:
    """How long the host takes to read a router's decision back: a copy of k numbers and the wait for it. 0 on a CPU.

    The fastest round's median: a bound is what a machine can do, and a virtual one has spells in which it takes longer.
    """
    device = engine.decoder.device
    if device.type == "cpu":
        return 0.0
    decision = torch.zeros(engine.origin.architecture.top_k, dtype=torch.int64, device=device)
    here = torch.zeros_like(decision, device="cpu").pin_memory()

    def read() -> None:
        here.copy_(decision, non_blocking=True)
        torch.cuda.current_stream(device).synchronize()

    return min(_median(read, device, times) for _ in range(rounds))


def record_seconds(engine: Engine, records: int = 64, rounds: int = 9) -> float:
    """How long one record takes from host memory to the device among others, S / B, by the fastest way there is: the copy
    engine brings one after another; kernels, where they reach the host's memory, bring all at once. So a bound made of it
    is no lower for a way that a machine is bad at. Of each the median of `rounds`, after one that does not count.
    """
    host, device = engine.host.memory.records, engine.decoder.device
    # A prime: records lie all over the host's memory, as a router's choices do.
    places = [(7919 * number) % len(host) for number in range(records)]
    into = torch.empty(engine.origin.architecture.top_k, host.shape[1], dtype=torch.uint8, device=device)
    fills = torch.tensor(
        [(place, number % len(into)) for number, place in enumerate(places)], dtype=torch.int32
    )

    def copies() -> None:
        for place, slot in fills.tolist():
            into[slot].copy_(host[place], non_blocking=True)

    ways: list[Callable[[], None]] = [copies]
    if device.type == "cuda" and engine.host.memory.pinned and isinstance(engine.host, Arena):
        from coresident.engines.moe.residency import unattended

        listed, filled = fills.to(device), torch.full((1,), records, dtype=torch.int32, device=device)
        ways.append(lambda: unattended.fetch(host, into, listed, filled, first=0))
    return min(_median(way, device, rounds) for way in ways) / records


def _median(what: Callable[[], None], device: torch.device, times: int) -> float:
    took = []
    for _ in range(1 + times):
        _finish(device)
        start = time.perf_counter()
        what()
        _finish(device)
        took.append(time.perf_counter() - start)
    return statistics.median(took[1:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
