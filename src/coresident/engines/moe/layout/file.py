"""The file of expert records: a header that says whose they are, a table of checksums, then the records.

0      8 bytes magic, 8 bytes length of the JSON, 32 bytes SHA-256 of it, the JSON
4096   layers x experts x 32 bytes: the SHA-256 of each record, zero for one not yet written
start  records, layer by layer, expert by expert, `RecordFormat.size` bytes each, all on 4 KiB boundaries
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from coresident.engines.moe.layout.record import PAGE, RecordFormat
from coresident.errors import MachineError, UserError

MAGIC = b"CORESMOE"
VERSION = 1
DIGEST = 32
_BLANK = bytes(DIGEST)
# A finished file is left as it is, damaged or not.
_AGAIN = "remove it, and write it again: coresident moe layout MODEL OUT"


@dataclass(frozen=True)
class Header:
    """What the file holds: of which model (`Checkpoint.identity`), how many records, and of what form."""

    model: str
    layers: int
    experts: int
    form: RecordFormat

    @property
    def start(self) -> int:
        """Where records begin."""
        table = self.layers * self.experts * DIGEST
        return PAGE + -(-table // PAGE) * PAGE

    @property
    def size(self) -> int:
        """Bytes of the finished file."""
        return self.start + self.layers * self.experts * self.form.size

    def offset(self, layer: int, expert: int) -> int:
        """Where a record begins."""
        return self.start + self._number(layer, expert) * self.form.size

    def digest_offset(self, layer: int, expert: int) -> int:
        """Where its checksum is."""
        return PAGE + self._number(layer, expert) * DIGEST

    def _number(self, layer: int, expert: int) -> int:
        return layer * self.experts + expert

    def encode(self) -> bytes:
        """The first page."""
        told = {"version": VERSION, "model": self.model, "layers": self.layers, "experts": self.experts}
        text = json.dumps({**told, "form": asdict(self.form)}, sort_keys=True).encode()
        return MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text


@dataclass(frozen=True)
class LayoutFile:
    """An open file of records."""

    path: Path
    header: Header

    def digests(self) -> list[bytes]:
        """Every record's checksum, layer by layer."""
        count = self.header.layers * self.header.experts
        with opened(self.path) as file:
            table = os.pread(file, count * DIGEST, PAGE)
        return [table[at : at + DIGEST] for at in range(0, len(table), DIGEST)]

    def belongs(self, model: str) -> None:
        """Raises UserError where the records are another model's."""
        if self.header.model != model:
            raise UserError(
                f"{self.path} holds the experts of another model ({self.header.model[:12]}, not {model[:12]})",
                "give the layout made of this model, or make it: coresident moe layout MODEL OUT",
            )


def open_layout(path: Path) -> LayoutFile:
    """The finished file at `path`. Raises UserError where it is none, damaged in its header, or not finished."""
    header = read_header(path)
    found = path.stat().st_size
    if found != header.size:
        raise UserError(f"{path} has {found} bytes, and its header says {header.size}", _AGAIN)
    layout = LayoutFile(path, header)
    if _BLANK in layout.digests():
        raise UserError(f"{path} is not finished", "run the same `coresident moe layout` again: it goes on")
    return layout


def read_header(path: Path, instead: str = "give one: coresident moe layout MODEL OUT makes it") -> Header:
    """The header alone. Raises UserError where the file is no such file (then do `instead`) or its header is damaged."""
    with opened(path) as file:
        page = os.pread(file, PAGE, 0)
    length = int.from_bytes(page[8:16], "little")
    text = page[48 : 48 + length]
    if page[:8] != MAGIC:
        raise UserError(f"{path} is no file of expert records", instead)
    if hashlib.sha256(text).digest() != page[16:48]:
        raise UserError(f"{path}: its header's checksum is wrong", _AGAIN)
    told = json.loads(text)
    if told["version"] != VERSION:
        raise UserError(f"{path} is of version {told['version']}, and {VERSION} is read here", _AGAIN)
    return Header(told["model"], told["layers"], told["experts"], RecordFormat(**told["form"]))


def check(layout: LayoutFile, progress: Callable[[int, int], None] = lambda *_: None) -> None:
    """Read every record and compare its checksum. Raises UserError naming the first that is wrong."""
    header, wanted = layout.header, layout.digests()
    keys = [(layer, expert) for layer in range(header.layers) for expert in range(header.experts)]
    with opened(layout.path) as file, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:

        def digest(key: tuple[int, int]) -> bytes:
            return hashlib.sha256(os.pread(file, header.form.size, header.offset(*key))).digest()

        for number, found in enumerate(pool.map(digest, keys)):
            if found != wanted[number]:
                raise bad_record(layout.path, *keys[number])
            progress(number + 1, len(keys))


def bad_record(path: Path, layer: int, expert: int) -> UserError:
    """The error for a record whose bytes are not those that were written."""
    return UserError(f"{path}: the record of layer {layer}, expert {expert} has a bad checksum", _AGAIN)


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """A descriptor of the file, closed afterwards. Raises UserError where it does not exist or is a directory."""
    if path.is_dir():
        raise UserError(
            f"{path} is a directory, and expert records are a file",
            f"name the file, such as {path / 'experts.records'}",
        )
    try:
        file = os.open(path, flags | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist", "make it: coresident moe layout MODEL OUT") from None
    except OSError as error:
        raise MachineError(
            f"{path} cannot be opened ({error.strerror})", "check the path and its permissions"
        ) from None
    try:
        yield file
    finally:
        os.close(file)
