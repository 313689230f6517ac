"""How one learner holds its base, on the processor's memory or on a card: the tensors, their checksum, and what
can be measured of them. The learner itself knows no difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from coresident.engines.pool.job import Job
from coresident.engines.pool.processes.channel import Channel, line, wait_for

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from coresident.engines.pool.base.base import BaseDir


@dataclass(frozen=True)
class Holding:
    """`tensors` are the base's, by name. `checksum` and `memory` take the model that uses them.

    `memory` tells `pss` in bytes (0: unreadable) and `held` (None: unreadable): a `sharing.Held`, or on a card a
    `device_sharing.DeviceHeld`. `unguarded` says why a write into the base would go unnamed, None if it would not.
    """

    tensors: dict[str, Tensor]
    checksum: Callable[[nn.Module], str]
    memory: Callable[[nn.Module], dict[str, Any]]
    unguarded: str | None


def on_host(job: Job, directory: BaseDir, arena: int, channel: Channel) -> Holding:
    """The base in this process's memory: `private`, `mapped`, or in the arena behind the descriptor `arena`."""
    from coresident.engines.pool.base import checksum, loading
    from coresident.engines.pool.learning.model import base_tensors
    from coresident.engines.pool.sharing import arena as arenas
    from coresident.engines.pool.sharing import fault, sharing

    dtype = job.parameters.dtype
    if job.hold == "private":
        tensors = loading.private(directory, dtype)
    elif job.hold == "mapped":
        tensors = loading.mapped(directory, dtype)
    else:
        take = arenas.attach if job.hold == "arena" else arenas.copied
        tensors = take(arena, job.layout(directory))
    unguarded = fault.guard(
        loading.ranges(tensors),
        channel.fileno(),
        wrote=line("failed", status="failed", reason="it wrote into the shared base at @"),
        cut=line("failed", status="failed", reason="the base's file was cut short while it was mapped, at @"),
    )

    def memory(model: nn.Module) -> dict[str, Any]:
        found: dict[str, Any] = {"pss": _pss(), "held": None}
        with contextlib.suppress(OSError):
            found["held"] = asdict(sharing.held(loading.ranges(base_tensors(model)).values()))
        return found

    def summed(model: nn.Module) -> str:
        # What the model really uses; the rest of the file (a stored copy of a tied layer) as it was loaded.
        return checksum.of_tensors({**tensors, **base_tensors(model)})

    return Holding(tensors, summed, memory, unguarded)


def on_card(job: Job, directory: BaseDir, card: torch.device, channel: Channel) -> Holding:
    """The base in one allocation on the card: this process's own, or the golden process's, whose handle comes
    over `channel` with the order `base`.
    """
    from coresident.engines.pool.card import device, device_checksum
    from coresident.engines.pool.learning.model import base_tensors
    from coresident.engines.pool.sharing import device_sharing, ipc

    plan = job.layout(directory)
    if job.hold == "private":
        block = device.load(plan, card)
    else:
        block = device.Block(ipc.attach(wait_for(channel, "base"), max(plan.size, 1)), plan, mapped=True)
        if job.hold == "arena-copy":
            # The view is gone with the last reference to it, and its mapping with it.
            block = device.copied(block)

    def memory(model: nn.Module) -> dict[str, Any]:
        held = asdict(device_sharing.held(base_tensors(model)))
        return {"pss": _pss(), "held": held, "mps": device.under_mps()}

    def summed(model: nn.Module) -> str:
        return device_checksum.of_block(block.memory, plan, base_tensors(model))

    return Holding(block.tensors(), summed, memory, "a card has no read-only mapping: checksums tell")


def _pss() -> int:
    from coresident.engines.pool.sharing import sharing

    with contextlib.suppress(OSError):
        return sharing.pss()
    return 0
