"""The one card of a process: whoever starts CUDA says the same where it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coresident.errors import MachineError

if TYPE_CHECKING:
    import torch


def card() -> torch.device:
    """The first card that this process sees, with CUDA started. Raises MachineError without one."""
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        raise MachineError(
            f"no CUDA device can be used: {' '.join(str(error).split())}",
            "check the driver with nvidia-smi and that this PyTorch is a CUDA build, or run with --device cpu",
        ) from error
    return torch.device("cuda", 0)
