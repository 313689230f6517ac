"""Where a decoder's missing experts come from: which reader, which file of records, which tier of the host."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from coresident.engines.moe import budget
from coresident.engines.moe.layout import writer
from coresident.engines.moe.layout.file import LayoutFile, open_layout
from coresident.engines.moe.layout.record import RecordFormat
from coresident.engines.moe.models.checkpoint import Checkpoint, open_checkpoint
from coresident.engines.moe.models.materialise import materialise
from coresident.engines.moe.models.origins import Drawn, Files, Origin
from coresident.engines.moe.parameters import Decode
from coresident.engines.moe.tiers import disk
from coresident.engines.moe.tiers.host import READERS, Host, arena, staged
from coresident.engines.moe.tiers.readers import OriginReader, Reader, RecordReader, ScatteredReader
from coresident.errors import UserError

CACHE = "CORESIDENT_CACHE"
Say = Callable[[str], None]


def layout_of(asked: Decode, origin: Origin, form: RecordFormat, say: Say) -> LayoutFile:
    """The file of records that was given, or one made under CORESIDENT_CACHE and kept there."""
    if asked.layout is not None:
        layout = open_layout(Path(asked.layout).expanduser())
        layout.belongs(origin.identity)
        if layout.header.form != form:
            raise UserError(
                f"{layout.path} keeps experts as {layout.header.form.encoding}, and {form.encoding} is asked for",
                "set encoding to what the file keeps, or give another layout",
            )
        return layout
    place = _home() / f"{origin.identity[:16]}-{form.encoding.lower()}.records"
    if not place.exists():
        say(f"writing {place}")
    return writer.write(origin, form, place)


def _materialised(origin: Drawn, say: Say) -> Checkpoint:
    """Drawn weights as a Hugging Face directory, made once: what scattered reads need."""
    place = _home() / f"{origin.identity[:16]}-model"
    if not place.exists():
        say(f"writing {place}")
        materialise(origin, place)
    return open_checkpoint(place)


def _home() -> Path:
    given = os.environ.get(CACHE)
    return (Path(given) if given else Path.home() / ".cache" / "coresident") / "experts"


def reader_of(asked: Decode, origin: Origin, form: RecordFormat, say: Say) -> Reader:
    """How experts are read."""
    direct = asked.tier == "disk"
    if asked.read_path.startswith("scattered"):
        checkpoint = origin.checkpoint if isinstance(origin, Files) else _materialised(origin, say)
        return ScatteredReader(checkpoint, form, direct, asked.read_path == "scattered-parallel")
    if asked.layout is None and asked.tier == "pinned":
        return OriginReader(origin, form)
    pieces = READERS if asked.read_path == "record-parallel" else 1
    return RecordReader(layout_of(asked, origin, form, say), direct, pieces)


def host_of(asked: Decode, reader: Reader, origin: Origin, at_once: int, pin: bool, say: Say) -> Host:
    """The tier below the slots; `at_once` is how many experts a step may miss."""
    if asked.tier == "pinned":
        return arena(reader, origin.layers, origin.experts, pin)
    files = [file.path for file in reader.files]
    if asked.tier == "page-cache":
        disk.warm(files)
    else:
        disk.drop(files)
    buffers, keep = max(2, min(2 * at_once, 32)), False
    if asked.host_memory is not None:
        memory = budget.parse_size(asked.host_memory, "host_memory")
        buffers, keep = min(memory // reader.form.size, origin.layers * origin.experts), True
        if buffers < 2:
            raise UserError(
                f"a host memory of {asked.host_memory} does not hold two experts of {reader.form.size:,} bytes",
                f"give at least {2 * reader.form.size} B, or leave it out",
            )
        say(f"{buffers} experts stay in host memory")
    return staged(reader, buffers, keep, pin, asked.verify)
