"""The fields that each event may have, and what each must be: the one table behind the reading of events.

A value passes exactly as JSON says it, or not at all: a string of digits, `true` or `1e400` is no number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, cast

from coresident.errors import nearest


class Fault(Exception):  # noqa: N818 - collected by the reader, never raised to a user
    """What is wrong with one event."""


class NotFinite(Fault):
    """What should have been data is no finite number."""


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        hint = " (write it without quotes, with a decimal point)" if isinstance(value, str) else ""
        raise Fault(f"{shown(value)} is not a number{hint}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise NotFinite(f"{number} is not a finite number")
    return number


def _time(value: Any) -> float:
    try:
        return _number(value)
    except NotFinite as fault:
        raise Fault(str(fault)) from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Fault(f"{shown(value)} is not a string")
    return value


def _name(value: Any) -> str:
    name = _text(value)
    if not 0 < len(name) <= 200 or not name.isprintable():
        raise Fault(f"{shown(name)} is not a name of 1 to 200 printable characters")
    return name


def _one_of(*allowed: str) -> Callable[[Any], str]:
    def checked(value: Any) -> str:
        if value not in allowed or not isinstance(value, str):
            raise Fault(f"{shown(value)} is none of {', '.join(allowed)}")
        return value

    return checked


def _json(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise Fault("holds a number that is not finite") from None
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Fault(f"{shown(value)} is not an object")
    return cast("dict[str, Any]", _json(value))


def _passed(value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise Fault(f"{shown(value)} is none of true, false, null")
    return value


def _values(value: Any) -> list[float | None]:
    if not isinstance(value, list):
        raise Fault(f"{shown(value)} is not a list")
    checked: list[float | None] = []
    for index, each in enumerate(value):
        try:
            checked.append(None if each is None else _number(each))
        except Fault as fault:
            raise type(fault)(f"value {index}: {fault}") from None
    return checked


def shown(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 60 else shown[:57] + "..."


# For each event its fields, each with the check that it must pass; those in `_OPTIONAL` may be left out.
_FIELDS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "phase": {"name": _name, "start": _time, "end": _time},
    "progress": {"done": _time, "total": _time, "unit": _text},
    "metric": {"name": _name, "value": _number, "unit": _text, "scope": _one_of("session", "cumulative")},
    "sample": {"name": _name, "value": _number, "unit": _text},
    "series": {"name": _name, "values": _values},
    "digest": {"name": _name, "value": _text},
    "control": {"name": _name, "asked": _json, "ran": _json, "passed": _passed, "reason": _text},
    "worker": {"id": _name, "start": _time, "end": _time, "work": _time, "unit": _text},
    "environment": {"values": _object},
    "failed": {"status": _one_of("failed", "oom", "nonfinite"), "reason": _text},
    "done": {},
}
_OPTIONAL = {
    "phase": {"start", "end"},
    "progress": {"unit"},
    "metric": {"scope"},
    "sample": {"unit"},
    "control": {"passed", "reason"},
}


def checked_event(value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """An event's name and its checked fields. Raises `Fault`, or `NotFinite` for what should be data."""
    event = value.get("event")
    if not isinstance(event, str) or event not in _FIELDS:
        raise Fault(f"unknown event {shown(event)}; {nearest(str(event), _FIELDS)}")
    fields = {"t": _time, **_FIELDS[event]}
    for name in value.keys() - fields.keys() - {"event"}:
        raise Fault(f"{event} has no field {name!r}; {nearest(name, fields)}")
    for name in fields.keys() - value.keys() - _OPTIONAL.get(event, set()) - {"t"}:
        raise Fault(f"{event} lacks the field {name!r}")
    subject = f"{event} {value['name']!r}" if isinstance(value.get("name"), str) else event
    checked = {}
    for name, check in fields.items():
        if name in value:
            try:
                checked[name] = check(value[name])
            except Fault as fault:
                raise type(fault)(f"{subject}: {name}: {fault}") from None
    return event, checked


def same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 is 1.0 but neither is true."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other
