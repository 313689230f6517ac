"""What can be asked of which device, said before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping

from coresident.engines.pool.card.mps import CLIENT_LIMIT
from coresident.engines.pool.parameters import DPO
from coresident.errors import UserError

CPU = "cpu"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def check(parameters: DPO, environment: Mapping[str, str] = os.environ) -> None:
    """Raise UserError for what no device can do."""
    if parameters.sharing in ("fork", "fork-copy"):
        for name in ALLOCATOR:
            if _expands(environment.get(name, "")):
                raise UserError(
                    f"sharing: {parameters.sharing} cannot export memory of expandable segments, which {name} asks for",
                    f"take expandable_segments out of {name}, or use sharing: none",
                )
    clients = device_processes(parameters)
    if parameters.mps == "on" and clients > CLIENT_LIMIT:
        raise UserError(
            f"mps: on with {parameters.learners} learners makes {clients} clients, and MPS serves"
            f" {CLIENT_LIMIT} a device (NVIDIA's documented limit; no driver tells its own)",
            f"ask for at most {CLIENT_LIMIT - (clients - parameters.learners)} learners, or set mps: off",
        )


def check_on(parameters: DPO, device: str) -> None:
    """Raise UserError for what `device` (`cpu` or a card's UUID) cannot do."""
    check(parameters)
    if device == CPU:
        if parameters.sharing == "smolvm":
            raise UserError(
                "sharing: smolvm remotes a CUDA device, and this runs on the CPU", "run it with --devices 0"
            )
        for asked, name in (
            (parameters.mps == "on", "mps"),
            (parameters.device_memory is not None, "device_memory"),
        ):
            if asked:
                raise UserError(
                    f"{name} is about a CUDA device, and this runs on the CPU", f"leave {name} out"
                )
    elif parameters.sharing == "mapped":
        raise UserError(
            "sharing: mapped has nothing to map on a CUDA device, whose memory no file can back",
            "use sharing: fork (one base for all) or sharing: none",
        )


def device_processes(parameters: DPO) -> int:
    """How many processes hold a context on the card at once: the learners, and the golden process."""
    together = parameters.at_once
    return together + (parameters.sharing in ("fork", "fork-copy"))


def _expands(setting: str) -> bool:
    options = dict(part.split(":", 1) for part in setting.split(",") if ":" in part)
    return options.get("expandable_segments", "").strip().lower() in ("true", "1")
