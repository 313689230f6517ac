"""Where a training computes: the device, the precision of its products, and what makes it deterministic.

Nothing may make a CUDA context before `settle` has said which card this process sees and, where determinism is asked for,
how cuBLAS works.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from coresident import cuda
from coresident.engines.pretrain.parameters import Runtime

if TYPE_CHECKING:
    import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"


def precision(runtime: Runtime, device: str) -> str:
    """What products are computed in: `auto` is bfloat16 on a card and float32 on a CPU. Weights are float32 in either case."""
    if runtime.precision != "auto":
        return runtime.precision
    return "float32" if device == "cpu" else "bfloat16"


def settle(runtime: Runtime, device: str) -> torch.device:
    """Make this process compute on `device` (`cpu`, or a card's UUID) as `runtime` says. Raises MachineError without one."""
    if device != "cpu":
        os.environ[VISIBLE] = device
    if runtime.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import torch

    if runtime.threads is not None:
        torch.set_num_threads(runtime.threads)
    torch.use_deterministic_algorithms(runtime.deterministic)
    # Filling fresh memory would show a read of it, and costs a pass over it; results are the same.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device == "cpu":
        return torch.device("cpu")
    card = cuda.card()
    # What autocast leaves in float32 may still use the tensor cores, except where bits must repeat or float32 is asked for.
    exact = runtime.deterministic or runtime.precision == "float32"
    torch.backends.cuda.matmul.allow_tf32 = not exact
    torch.backends.cudnn.allow_tf32 = not exact
    return card


def name(device: torch.device) -> str:
    """What the device is called, as its driver does."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def dtype(precision: str) -> torch.dtype:
    """`float32` or `bfloat16` as PyTorch has it."""
    import torch

    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def peak_memory(device: torch.device) -> int | None:
    """Bytes that tensors occupied on a card at the highest; None on a CPU."""
    import torch

    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None


def deterministic() -> bool:
    """Whether PyTorch takes only deterministic algorithms now."""
    import torch

    return torch.are_deterministic_algorithms_enabled()
