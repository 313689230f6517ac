"""Preference files: one JSON object a line with prompt, chosen and rejected, as TRL reads them.

Each of the three is a string, or each is a list of chat messages (objects with `role` and `content`). A bad
line is an error that names it: a training that silently skips lines compares nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coresident.errors import UserError

Messages = tuple[Mapping[str, str], ...]
FIELDS = ("prompt", "chosen", "rejected")
# TRL lets these change what a chat template renders. Reading past them would train on other tokens than TRL
# does.
UNSUPPORTED = ("tools", "chat_template_kwargs", "images", "image")


@dataclass(frozen=True)
class Pair:
    """A prompt, a preferred and a rejected completion: three strings, or three sequences of chat messages.

    `origin` says where the pair comes from ("FILE line N"), for errors; pairs made from a seed have none.
    """

    prompt: str | Messages
    chosen: str | Messages
    rejected: str | Messages
    origin: str = ""


def read(path: Path) -> list[Pair]:
    """All pairs of a JSONL file, in order; blank lines are skipped. Raises UserError naming file and line."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}", "give a readable JSONL file of preference pairs"
        ) from None
    pairs = [
        _pair(line, f"{path} line {number}")
        for number, line in enumerate(content.split(b"\n"), start=1)
        if line.strip()
    ]
    if not pairs:
        raise UserError(
            f"{path} holds no preference pair", "give one JSON object a line with prompt, chosen and rejected"
        )
    return pairs


def _pair(line: bytes, origin: str) -> Pair:
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
        raise UserError(
            f"{origin}: nested too deeply", "write prompt, chosen and rejected as text or messages"
        ) from None
    if not isinstance(entry, dict):
        raise UserError(f"{origin}: {_kind(entry)} where an object is needed", "write one JSON object a line")
    for field in FIELDS:
        if field not in entry:
            raise UserError(f"{origin}: {field!r} is missing", "give every line prompt, chosen and rejected")
    for field in UNSUPPORTED:
        if entry.get(field):
            raise UserError(
                f"{origin}: {field!r} is not supported", "remove it: pairs are text or plain chat messages"
            )
    prompt, chosen, rejected = (_side(entry[field], field, origin) for field in FIELDS)
    if not isinstance(prompt, str) == isinstance(chosen, str) == isinstance(rejected, str):
        raise UserError(
            f"{origin}: text and chat messages are mixed", "write all three as text or all three as messages"
        )
    return Pair(prompt, chosen, rejected, origin)


def _side(value: Any, field: str, origin: str) -> str | Messages:
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
