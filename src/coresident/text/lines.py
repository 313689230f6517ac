"""Training files: one JSON object a line, each of whose fields is a text or a list of chat messages (objects with
`role` and `content`). A bad line is an error that names it: a training that silently skips lines compares
nothing.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from coresident.errors import UserError

Messages = tuple[Mapping[str, str], ...]
# TRL lets these change what a chat template renders. Reading past them would train on other tokens than TRL
# does.
UNSUPPORTED = ("tools", "chat_template_kwargs", "images", "image")


def entries(
    path: Path, of: str, fields: str, refused: Collection[str] = UNSUPPORTED
) -> Iterator[tuple[dict[str, Any], str]]:
    """The object of every line with its origin ("FILE line N"), in order; blank lines are skipped.

    Raises UserError naming file and line, for a line with one of the keys `refused`, and for a file without any `of`,
    which have `fields`.
    """
    empty = True
    for number, line in enumerate(_lines(path, of), start=1):
        if line.strip():
            empty = False
            origin = f"{path} line {number}"
            yield _entry(line, origin, fields, refused), origin
    if empty:
        raise UserError(f"{path} holds no {of}", f"give one JSON object a line with {fields}")


def _lines(path: Path, of: str) -> Iterator[bytes]:
    number = 0
    try:
        with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):  # noqa: B007 - an error says it
                yield line.removesuffix(b"\n")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"{path} after line {number}: not gzip, or not all of it: {error}",
            "copy it again from its source",
        ) from None
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}", f"give a readable JSONL file of {of}s"
        ) from None


def _entry(line: bytes, origin: str, fields: str, refused: Collection[str]) -> dict[str, Any]:
    try:
        entry = json.loads(
            line.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates
        )
    except UnicodeDecodeError as error:
        raise UserError(f"{origin}: byte {error.start + 1} is not UTF-8", "save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{origin}: not JSON at column {error.colno}: {error.msg}", "write one JSON object a line"
        ) from None
    except ValueError as error:
        raise UserError(f"{origin}: {error}", "write strict JSON, one object a line") from None
    except RecursionError:
        raise UserError(f"{origin}: nested too deeply", f"write {fields} as text or messages") from None
    if not isinstance(entry, dict):
        raise UserError(f"{origin}: {_kind(entry)} where an object is needed", "write one JSON object a line")
    for field in refused:
        if entry.get(field):
            raise UserError(
                f"{origin}: {field!r} is not supported", "remove it: a line holds text or plain chat messages"
            )
    return entry


def side(value: Any, field: str, origin: str) -> str | Messages:
    """A field's value, checked: not empty, and nothing that TRL would read otherwise."""
    if isinstance(value, str):
        return _text(value, field, origin)
    if not isinstance(value, list):
        raise UserError(f"{origin}: {field!r} is {_kind(value)}", "give a string or a list of chat messages")
    if not value:
        raise UserError(f"{origin}: {field!r} is empty", "give at least one message, or remove the line")
    return tuple(_message(message, f"{field}[{index}]", origin) for index, message in enumerate(value))


def _message(value: Any, where: str, origin: str) -> Mapping[str, str]:
    remedy = "give each message a `role` and a `content`, both strings, and nothing else"
    if not isinstance(value, dict):
        raise UserError(f"{origin}: '{where}' is {_kind(value)}", remedy)
    if set(value) != {"role", "content"}:
        raise UserError(f"{origin}: '{where}' has the keys {', '.join(sorted(value)) or 'none'}", remedy)
    for key, text in value.items():
        if not isinstance(text, str):
            raise UserError(f"{origin}: '{where}.{key}' is {_kind(text)}", remedy)
        _text(text, f"{where}.{key}", origin)
    return value


def _text(value: str, field: str, origin: str) -> str:
    if not value.strip():
        raise UserError(f"{origin}: {field!r} is empty", "give it text, or remove the line")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise UserError(
            f"{origin}: {field!r} holds half a surrogate pair", "write the character whole, as UTF-8"
        )
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _refuse_duplicates(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in entries]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"the key {key!r} is there twice")
    return dict(entries)


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")
