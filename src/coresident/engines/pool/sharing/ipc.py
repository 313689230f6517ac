"""A base's allocation on the card, handed to another process: as JSON, with nothing in it that could run.

PyTorch's `reduce_tensor` describes a CUDA tensor by a handle of its whole allocation (CUDA IPC) and a
counter of its consumers; each result is good for exactly one consumer, and the producer must outlive them
all (PyTorch, "Multiprocessing best practices"). What it returns is sent here as plain values, since a pickle
is a program.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coresident.errors import InternalError

_BYTES = ("handle", "counter", "signal")
_INTEGERS = ("storage_size", "storage_offset", "counter_offset")


def export(memory: Tensor) -> dict[str, Any]:
    """What one consumer needs to map `memory`, a whole uint8 tensor on the card."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

    rebuild, told = reduce_tensor(memory)  # type: ignore[no-untyped-call]
    if rebuild is not rebuild_cuda_tensor or len(told) != 15:
        raise InternalError("this PyTorch describes CUDA tensors in a way that coresident does not know")
    return {
        "size": int(told[1][0]),
        "tensor_offset": int(told[3]),
        "handle": _text(told[7]),
        "storage_size": int(told[8]),
        "storage_offset": int(told[9]),
        "counter": _text(told[11]),
        "counter_offset": int(told[12]),
        "signal": _text(told[13]),
        "signal_sync": bool(told[14]),
    }


def attach(told: Mapping[str, Any], size: int) -> Tensor:
    """The producer's memory in this process, uint8 [size]. Raises InternalError where it is not what was to come."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    values = checked(told, size)
    memory: Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        Tensor,
        torch.Size([size]),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        0,
        values["handle"],
        values["storage_size"],
        values["storage_offset"],
        False,
        values["counter"],
        values["counter_offset"],
        values["signal"],
        told["signal_sync"],
    )
    return memory


def checked(told: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The values of a message as `attach` takes them: right kinds, and no size but the base's."""
    try:
        values: dict[str, Any] = {name: base64.b64decode(told[name], validate=True) for name in _BYTES}
        for name in _INTEGERS:
            if type(told[name]) is not int or told[name] < 0:
                raise ValueError(f"{name} is {told[name]!r}")
            values[name] = told[name]
        if type(told["signal_sync"]) is not bool:
            raise ValueError(f"signal_sync is {told['event_sync']!r}")
        if (told["size"], told["tensor_offset"]) != (size, 0) or told["storage_size"] < size:
            raise ValueError(f"it is {told['size']} bytes long where the base has {size}")
    except (KeyError, TypeError, ValueError) as error:
        raise InternalError(f"a golden process sent a handle that cannot be used: {error}") from None
    return values


def _text(value: bytes) -> str:
    return base64.b64encode(bytes(value)).decode("ascii")
