"""Texts in files of a person's own: plain text, and JSON lines, gzipped or not (as C4's shards are).

A text that is none (not UTF-8, NUL bytes) is an error that names file and place: to skip it, or to replace what cannot be
read, would train on something else than what was given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from coresident.errors import UserError
from coresident.text.lines import entries

_PLAIN = (".txt", ".md", ".rst", ".py")
_LINES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
_KNOWN = (*_PLAIN, *_LINES)


def texts(paths: Sequence[str], field: str, separator: str | None) -> Iterator[str]:
    """The texts of files and directories (all their files of a known kind, in the order of their names), in order."""
    for path in paths:
        for file in _files(Path(path).expanduser()):
            if file.name.lower().endswith(_LINES):
                yield from _lines(file, field)
            else:
                yield from _plain(file, separator)


def left_out(paths: Sequence[str]) -> Counter[str]:
    """How many files of directories are not read because their kind is not known, by their suffix."""
    directories = {one for one in (Path(path).expanduser() for path in paths) if one.is_dir()}
    return Counter(_suffix(file) for one in sorted(directories) for file in _within(one, known=False))


def _suffix(file: Path) -> str:
    parts = file.suffixes[-2:] if file.suffix.lower() == ".gz" else [file.suffix]
    return "".join(parts).lower() or "no suffix"


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = _within(path, known=True)
    if not found:
        raise UserError(f"{path} holds no text", f"give files that end in {', '.join(_KNOWN)}")
    return found


def _within(directory: Path, known: bool) -> list[Path]:
    """The directory's files whose kind is known, or those whose kind is not, in the order of their names."""
    files = (one for one in directory.rglob("*") if one.is_file())
    return sorted(one for one in files if one.name.lower().endswith(_KNOWN) == known)


def _lines(path: Path, field: str) -> Iterator[str]:
    for entry, origin in entries(path, "document", f"the text in {field!r}", refused=()):
        if field not in entry:
            raise UserError(
                f"{origin}: {field!r} is missing", "give every line that key, or name another (source.field)"
            )
        yield _string(entry[field], field, origin)


def _string(value: object, field: str, origin: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{origin}: {field!r} is no string", "give the text as a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{origin}: {field!r} holds half a surrogate pair", "write the character whole, as UTF-8"
        ) from None
    return value


def _plain(path: Path, separator: str | None) -> Iterator[str]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", "give a readable text file") from None
    remedy = "give text in UTF-8 (or JSON lines: .jsonl, .json.gz)"
    if (place := content.find(b"\0")) >= 0:
        raise UserError(f"{path} is binary: byte {place + 1} is NUL", remedy)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text: byte {error.start + 1} is not UTF-8", remedy) from None
    yield from text.split(separator) if separator is not None else (text,)
