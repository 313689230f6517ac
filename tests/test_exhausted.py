"""Memory that ran out is seen as such, whoever says so and however it is wrapped; what is not is left."""

from __future__ import annotations

import errno

import pytest
import torch

from coresident.exhausted import ran_out

DEVICE = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
CUDNN = RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")


def _torch_has_no_memory() -> BaseException:
    try:
        torch.empty(1 << 49, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError("512 TiB, more than there are addresses for, were there")


def raised_from(inner: BaseException, outer: BaseException) -> BaseException:
    try:
        raise outer from inner
    except type(outer) as error:
        return error


def raised_after(inner: BaseException, outer: BaseException) -> BaseException:
    try:
        try:
            raise inner
        finally:
            raise outer
    except type(outer) as error:
        return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "out of memory"),
        (MemoryError("a private base of 9 bytes"), "a private base of 9 bytes"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
        (DEVICE, "CUDA out of memory"),
        (torch.OutOfMemoryError(), "out of memory"),
        (RuntimeError("CUDA error: out of memory"), "CUDA error"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "CUBLAS"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "CUDNN"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes"), "RESOURCE_EXHAUSTED"),
        (_torch_has_no_memory(), "can't allocate memory"),
        (raised_from(DEVICE, RuntimeError("backend='inductor' raised")), "CUDA out of memory"),
        (raised_after(DEVICE, RuntimeError("operation failed due to a previous error during capture")), "CUDA"),
    ],
)  # fmt: skip
def test_all_its_forms(error: BaseException, said: str) -> None:
    found = ran_out(error)
    assert found is not None
    assert said in found


@pytest.mark.parametrize(
    "error",
    [
        None,
        RuntimeError("shape mismatch"),
        ValueError("out of memory is no name of a device"),
        OSError(errno.ENOSPC, "No space left on device"),
        # A mistake of what was to save memory.
        raised_after(DEVICE, KeyError("smaller")),
        CUDNN,
    ],
)
def test_other_errors_are_none_of_it(error: BaseException | None) -> None:
    assert ran_out(error) is None


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (4 << 20, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR, with 4.0 MiB free on the card"),
        (8 << 30, None),
        (None, None),
    ],
)
def test_a_library_that_fails_where_no_memory_is_left_had_none(
    monkeypatch: pytest.MonkeyPatch, free: int | None, said: str | None
) -> None:
    def answer() -> tuple[int, int]:
        if free is None:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return free, 140 << 30

    # A card's answer, on a machine without one.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", answer)
    assert ran_out(CUDNN) == said
