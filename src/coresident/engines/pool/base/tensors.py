"""Where each tensor's bytes lie: in safetensors files, and in one contiguous allocation that holds a whole
base.

The library reads tensors but does not tell their offsets, which mapping and reading in place need. Format:
https://huggingface.co/docs/safetensors (8 bytes little-endian header length, JSON header, data).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coresident.engines.pool.quantised.names import is_state
from coresident.errors import UserError

# Cache lines, and what torch gives its own CPU tensors: kernels then take the same path wherever a base lies.
ALIGNMENT = 64
# What cudaMalloc and torch's own allocator give; vectorised kernels ask for less.
DEVICE_ALIGNMENT = 256
HEADER_LIMIT = 100_000_000

# safetensors' names of the types: torch's name and the bytes of one element.
TYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
NAMES = {name: code for code, (name, _) in TYPES.items()}
WIDTH = dict(TYPES.values())
FLOATING = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `offset` and `size` in bytes, from the file's start; `dtype` by torch's name."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Slot:
    """A tensor's place in an allocation; `offset` is a multiple of the alignment; `dtype` is what is held
    there.
    """

    stored: Stored
    dtype: str
    offset: int
    size: int

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.stored.name


@dataclass(frozen=True)
class Layout:
    """Where every tensor of a base lies in one allocation of `size` bytes. Equal for equal bases, in every
    process.
    """

    slots: tuple[Slot, ...]
    size: int


def header(file: Path) -> tuple[Stored, ...]:
    """The tensors of one safetensors file, by position in it.

    Raises `UserError` for a file that is no safetensors file, is torn, or holds types we cannot train on.
    """
    again = f"fetch or convert {file.name} again"
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            total = file.stat().st_size
            if not 2 <= length <= min(HEADER_LIMIT, total - 8):
                raise UserError(f"{file} is torn or no safetensors file", again)
            described = json.loads(stream.read(length))
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror})", "check the path and its permissions"
        ) from None
    except ValueError:
        raise UserError(f"{file} has a header that is not JSON", again) from None
    found = [
        _stored(file, name, entry, 8 + length) for name, entry in described.items() if name != "__metadata__"
    ]
    found.sort(key=lambda tensor: tensor.offset)
    end = max((tensor.offset + tensor.size for tensor in found), default=8 + length)
    if end != total:
        what = "is torn" if total < end else "is longer than its header says"
        raise UserError(f"{file} {what}: {total} bytes where {end} were written", again)
    return tuple(found)


def _stored(file: Path, name: str, entry: Any, data: int) -> Stored:
    try:
        code, shape = entry["dtype"], tuple(int(extent) for extent in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (TypeError, KeyError, ValueError):
        raise UserError(
            f"{file} describes {name} in a way no safetensors file does", "convert it again"
        ) from None
    if code not in TYPES:
        raise UserError(
            f"{file} holds {name} as {code}, which cannot be trained on",
            "use a checkpoint that is not quantised",
        )
    dtype, width = TYPES[code]
    if end - begin != math.prod(shape) * width or begin < 0:
        raise UserError(f"{file} gives {name} a size that is not its shape's", "convert it again")
    return Stored(name, file, dtype, shape, data + begin, end - begin)


def converted(stored: Stored) -> bool:
    """Whether a tensor is held in the run's type, whatever it is stored in."""
    return stored.dtype in FLOATING and not is_state(stored.name)


def layout(tensors: Iterable[Stored], dtype: str, alignment: int = ALIGNMENT) -> Layout:
    """One allocation for all tensors, floating ones held as `dtype` (what belongs to a quantised weight: as it is),
    in the order of their names.
    """
    slots: list[Slot] = []
    at = 0
    for stored in sorted(tensors, key=lambda tensor: tensor.name):
        held = dtype if converted(stored) else stored.dtype
        size = math.prod(stored.shape) * WIDTH[held]
        slots.append(Slot(stored, held, at, size))
        at += -(-size // alignment) * alignment
    return Layout(tuple(slots), at)


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The start of a safetensors file of `(name, dtype, shape)` written one after another without gaps.

    Padded with spaces, which the format allows, so that the data begins at a multiple of `ALIGNMENT`.
    """
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * WIDTH[dtype]
        described[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
