"""Where each tensor of a Hugging Face directory lies: file, offset, dtype and shape, from the files' own headers.

Headers are read here rather than by a library since expert tensors are later read past the page cache, by byte ranges.
The format: 8 bytes of length, little-endian, then that much JSON, then the data (github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coresident.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Bytes of one element. Others (8-bit floats, integers) are not weights that we compute with.
WIDTHS = {"BF16": 2, "F16": 2, "F32": 4}
_AGAIN = "copy the model's files again from their source"
_HEADER_LIMIT = 100_000_000


@dataclass(frozen=True)
class Piece:
    """`size` bytes at `offset` of `file`: `shape` elements of `dtype` (BF16, F16 or F32), row-major."""

    name: str
    file: Path
    offset: int
    size: int
    dtype: str
    shape: tuple[int, ...]

    def rows(self, first: int, last: int) -> Piece:
        """Rows [first, last) of the first dimension."""
        row = self.size // self.shape[0]
        return Piece(
            f"{self.name}[{first}:{last}]",
            self.file,
            self.offset + first * row,
            (last - first) * row,
            self.dtype,
            (last - first, *self.shape[1:]),
        )

    def at(self, index: int) -> Piece:
        """Element `index` of the first dimension."""
        inner = self.rows(index, index + 1)
        return Piece(f"{self.name}[{index}]", self.file, inner.offset, inner.size, self.dtype, self.shape[1:])


def stored(path: Path) -> dict[str, Piece]:
    """Every tensor of the directory by its name, whichever file and order it is in.

    Raises UserError for a missing or damaged shard, and for a tensor that two shards hold or the index puts elsewhere.
    """
    placed = _index(path)
    names = sorted(set(placed.values())) if placed is not None else [SINGLE]
    found: dict[str, Piece] = {}
    for name in names:
        for piece in _pieces(path / name):
            if piece.name in found:
                raise UserError(
                    f"{piece.name} is in {found[piece.name].file} and in {piece.file}",
                    "keep one of the two files",
                )
            found[piece.name] = piece
    for tensor, name in (placed or {}).items():
        if tensor not in found or found[tensor].file.name != name:
            raise UserError(f"{path / INDEX}: it puts {tensor} into {name}, which does not hold it", _AGAIN)
    return found


def _index(path: Path) -> dict[str, str] | None:
    file, single = path / INDEX, (path / SINGLE).is_file()
    if not file.is_file():
        if not single:
            raise UserError(
                f"{path} holds neither {SINGLE} nor {INDEX}", "give a directory with weights in safetensors"
            )
        return None
    try:
        placed = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        if any(Path(name).name != name for name in placed.values()):
            raise ValueError("it names files elsewhere")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be used: {' '.join(str(error).split())}", _AGAIN) from None
    if single and set(placed.values()) != {SINGLE}:
        # Two models may be here, and transformers takes the one that we would not.
        raise UserError(f"{path} holds both {SINGLE} and {INDEX} of other files", "keep one of the two")
    return dict(placed)


def _pieces(file: Path) -> Iterator[Piece]:
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
                raise ValueError("it is cut short, or no safetensors file")
            header = json.loads(opened.read(length))
        entries = [
            _piece(file, name, value, 8 + length) for name, value in header.items() if name != "__metadata__"
        ]
    except FileNotFoundError:
        raise UserError(f"{file} does not exist", "copy the missing shard from the model's source") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be read: {' '.join(str(error).split())}", _AGAIN) from None
    for piece in entries:
        if piece.offset + piece.size > size:
            raise UserError(f"{file} is cut short: {piece.name} ends beyond it", _AGAIN)
        yield piece


def _piece(file: Path, name: str, value: Any, start: int) -> Piece:
    dtype, shape, (first, last) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    if dtype in WIDTHS and last - first != math.prod(shape) * WIDTHS[dtype]:
        raise ValueError(f"{name} has {last - first} bytes for {list(shape)} of {dtype}")
    return Piece(name, file, start + first, last - first, dtype, shape)
