"""`--set dotted.key=value`: changes to a study from the command line, typed like the file and checked like
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coresident.errors import UserError
from coresident.lab.study.source import Path, Source, dotted, read


def apply(raw: dict[str, Any], source: Source, overrides: Sequence[str]) -> None:
    """Put each `dotted.key=value` into `raw`, in order, and note in `source` that it came from there.

    Keys that do not exist are created: whether they may is for the schema to say. Below `factors` and below
    an arm or a hypothesis whose name contains dots, the longest existing name wins. Raises `UserError` for
    text that is no `key=value`, a value that is not YAML, and a path that leads through something other
    than a mapping.
    """
    for text in overrides:
        key, equals, value_text = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            given = key.strip() if all(parts) else "dotted.key"
            raise UserError(
                f"--set {text}: not of the form dotted.key=value", f"write it so: --set {given}=VALUE"
            )
        value, _ = read(value_text, f"--set {text}")
        path = _put(raw, parts, value, text)
        _forget(source, path)
        source.overrides[path] = text


def _put(raw: dict[str, Any], parts: Sequence[str], value: Any, text: str) -> Path:
    """Returns the path that is new or changed: the value's own, or that of the first mapping made for it."""
    here: dict[str, Any] = raw
    path: list[str] = []
    made: Path | None = None
    rest = list(parts)
    while True:
        name, rest = _next_name(here, path, rest)
        path.append(name)
        if not rest:
            here[name] = value
            return made or tuple(path)
        inner = here.get(name)
        if inner is None:
            inner = here[name] = {}
            made = made or tuple(path)
        if not isinstance(inner, dict):
            kind = "a list: set it whole" if isinstance(inner, list) else "not a mapping"
            raise UserError(
                f"--set {text}: {dotted(path)} is {kind}", f"for example: --set {dotted(path)}=..."
            )
        here = inner


def _next_name(here: dict[str, Any], path: Sequence[str], rest: Sequence[str]) -> tuple[str, list[str]]:
    # A factor's name is itself a dotted key of the parameters, so all that follows `factors.` is one name.
    if list(path) == ["factors"]:
        return ".".join(rest), []
    for length in range(len(rest), 1, -1):
        name = ".".join(rest[:length])
        if name in here:
            return name, list(rest[length:])
    return rest[0], list(rest[1:])


def _forget(source: Source, path: Path) -> None:
    for known in (source.lines, source.overrides):
        for old in [old for old in known if old[: len(path)] == path]:
            del known[old]
