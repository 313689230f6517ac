"""Memory that ran out is seen as such, whoever says so and however it is wrapped."""

from __future__ import annotations

import pytest
import torch

from coresident.engines.pretrain.outcomes import OutOfMemory, is_out_of_memory, memory_outcome


def wrapped(inner: BaseException) -> BaseException:
    try:
        raise RuntimeError("backend='inductor' raised") from inner
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 10 bytes"),
        MemoryError(),
        wrapped(torch.OutOfMemoryError("CUDA out of memory")),
    ],
)
def test_all_its_forms(error: BaseException) -> None:
    assert is_out_of_memory(error)
    with pytest.raises(OutOfMemory, match="smaller microbatch"), memory_outcome():
        raise error


def test_other_errors_stay_what_they_are() -> None:
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    with pytest.raises(RuntimeError, match="shape mismatch"), memory_outcome():
        raise RuntimeError("shape mismatch")
