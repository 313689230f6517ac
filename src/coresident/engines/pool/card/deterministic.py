"""Settings under which a card gives equal bits from run to run, where that costs time.

Attention uses PyTorch's plain form: its fused forms are deterministic only in some versions and shapes.
cuBLAS needs a fixed workspace (CUBLAS_WORKSPACE_CONFIG), which must be in the environment before it starts.
"""

from __future__ import annotations

from typing import Any

VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def apply() -> dict[str, Any]:
    """Ask for it in this process; what took effect, read back."""
    import torch

    torch.use_deterministic_algorithms(True)
    # Filling fresh memory shows reads of it, and costs a pass over it; results are the same.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_math_sdp(True)
    plain, flash = (
        torch.backends.cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
        torch.backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
    )
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": bool(torch.backends.cuda.matmul.allow_tf32),
        "attention": "math" if plain and not flash else "fused",
    }
