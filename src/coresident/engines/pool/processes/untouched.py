"""Proof that a process may be forked: one thread, and a card that it has never touched.

A child of a process that ran one parallel operation hangs in its own first one, and a device context does
not survive a fork. `torch.cuda.is_initialized()` proves nothing: another library may have called the driver.
So the driver itself is asked, and the open files are looked at.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coresident.errors import InternalError, MachineError

_NOT_INITIALIZED = 3
_REMEDY = "uninstall the library that does so (bitsandbytes?) or use sharing: none"


def untouched() -> int:
    """The number of threads of this process, which is one. Raises if a fork of it would not be safe."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    threads = int(next(line.split()[1] for line in status.splitlines() if line.startswith("Threads:")))
    if threads != 1:
        raise InternalError(f"the zygote has {threads} threads, so a fork of it could hang")
    require_no_device()
    return threads


def require_no_device(files: Path = Path("/proc/self/fd"), maps: Path = Path("/proc/self/maps")) -> None:
    """Raise MachineError if this process has a device file open or has initialised the CUDA driver."""
    for descriptor in files.iterdir():
        with contextlib.suppress(OSError):
            name = str(descriptor.readlink())
            if name.startswith("/dev/nvidia"):
                raise MachineError(
                    f"an imported library has opened {name} in the zygote, which then cannot be forked",
                    _REMEDY,
                )
    for line in maps.read_text(encoding="utf-8").splitlines():
        if "libcuda.so" in line and _initialized(line.split(maxsplit=5)[-1]):
            raise MachineError(
                "an imported library has started the CUDA driver in the zygote, which then cannot be forked",
                _REMEDY,
            )


def _initialized(library: str) -> bool:
    """Whether the driver, which is loaded, has been initialised; if it cannot be asked, it has been."""
    try:
        driver = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        count, context = ctypes.c_int(), ctypes.c_void_p()
        answers = driver.cuDeviceGetCount(ctypes.byref(count)), driver.cuCtxGetCurrent(ctypes.byref(context))
    except (OSError, AttributeError):
        return True
    return any(answer != _NOT_INITIALIZED for answer in answers)


# What libraries import where it is installed and no learner needs: it starts threads (pyarrow), asks the driver
# (bitsandbytes, jax), or takes seconds.
OPTIONAL = (
    "bitsandbytes",
    "cv2",
    "datasets",
    "jax",
    "matplotlib",
    "pandas",
    "pyarrow",
    "scipy",
    "sklearn",
    "tensorflow",
    "torchaudio",
    "torchvision",
)


@contextlib.contextmanager
def imports_alone() -> Iterator[None]:
    """Libraries that look for a card or for optional packages while they are imported find none.

    Asking for a card starts the driver. Every learner imports like this, forked or not, so that all arms run the
    same code.
    """
    import torch

    hidden: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", False),
        (torch.cuda, "device_count", 0),
    ]
    # What tells a CUDA build is that this exists, so it is hidden where it does only.
    if hasattr(torch._C, "_cuda_getDeviceCount"):
        hidden.append((torch._C, "_cuda_getDeviceCount", 0))
    kept = [getattr(owner, name) for owner, name, _ in hidden]
    packages = [name for name in OPTIONAL if name not in sys.modules]
    for owner, name, answer in hidden:
        setattr(owner, name, _constant(answer))
    for name in packages:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in packages:
            del sys.modules[name]
        for (owner, name, _), value in zip(hidden, kept, strict=True):
            setattr(owner, name, value)


def _constant(answer: Any) -> Any:
    return lambda *_, **__: answer
