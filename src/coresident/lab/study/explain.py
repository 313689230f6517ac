"""One sentence for what a schema refuses: the key, what is wrong with it, and the nearest key that would be
right.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from coresident.errors import UserError, nearest
from coresident.lab.study.source import NOTHING, Path, below

_KINDS = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "list_type": "a list",
    "tuple_type": "a list",
    "is_instance_of": "of another kind",
}
_ANY_OF = {"a string": 0, "a whole number": 1, "a number": 2, "true or false": 3}


def explain(
    error: ValidationError,
    model: type[BaseModel],
    data: Any,
    where: Callable[[Path], str],
    line: Callable[[Path], int] = lambda _: 0,
) -> UserError:
    """The first thing to correct among all that `model` refused in `data`.

    `where` names a path for people; `line` orders paths as they stand in the file. Unknown keys come first,
    since a misspelt key is also a missing one; missing keys last.
    """
    found: dict[Path, list[Any]] = {}
    for item in error.errors(include_url=False):
        path = _existing(data, item["loc"], item["type"])
        found.setdefault(path, []).append(item)
    rank = {"extra_forbidden": 0, "missing": 2}
    path, items = min(found.items(), key=lambda entry: (rank.get(entry[1][0]["type"], 1), line(entry[0])))
    what, remedy = _sentence(items, model, path)
    if items[0]["type"] == "extra_forbidden" and (meant := _deeper(data, path)):
        remedy = f"did you mean {meant!r}?"
    more = f" (the first of {len(found)} problems)" if len(found) > 1 else ""
    return UserError(f"{where(path)}: {what}{more}", remedy)


def _deeper(data: Any, path: Path) -> str | None:
    """Where a key that `path` names at the top stands one level further down, such as parameters.steps for steps."""
    if len(path) > 1 or not isinstance(data, Mapping):
        return None
    parents = (key for key, inner in data.items() if isinstance(inner, Mapping) and path[0] in inner)
    return next((f"{parent}.{path[0]}" for parent in parents), None)


def keys_at(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """The keys that `model` knows at `path`; empty where any key may stand."""
    choices: list[Any] = [model]
    for part in path:
        choices = [inner for choice in choices for inner in _below(choice, part)]
    return sorted({name for choice in choices for name in _fields(choice)})


def _existing(data: Any, location: Sequence[str | int], kind: str) -> Path:
    """pydantic's location without the names of union branches, which are no keys of the file."""
    path: list[str | int] = []
    here = data
    for at, part in enumerate(location):
        inner = below(here, part)
        if inner is NOTHING and not (kind == "missing" and at == len(location) - 1):
            break
        here = inner
        path.append(part)
    return tuple(path)


def _sentence(items: Sequence[Any], model: type[BaseModel], path: Path) -> tuple[str, str]:
    item = items[0]
    kind, given, context = item["type"], item["input"], item.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key {path[-1]!r}", nearest(str(path[-1]), keys_at(model, path[:-1]))
    if kind == "missing":
        return f"the key {path[-1]!r} is missing", "add it"
    if item["loc"] and item["loc"][-1] == "[key]" and kind == "string_pattern_mismatch":
        problem = f"the name {given!r} is not usable"
        return (
            problem,
            "use letters, digits, '.', '_' and '-', starting with a letter or a digit (64 at most)",
        )
    wanted = sorted(
        {_KINDS[each["type"]] for each in items if each["type"] in _KINDS}, key=lambda k: _ANY_OF.get(k, 9)
    )
    if wanted and all(each["type"] in _KINDS or each["type"] == "none_required" for each in items):
        quote = (
            "put the value in quotes" if "a string" in wanted and not isinstance(given, dict | list) else ""
        )
        return f"must be {' or '.join(wanted)}, not {_shown(given)}", quote or "correct the value"
    if kind == "literal_error":
        known = re.findall(r"'([^']*)'", context.get("expected", ""))
        remedy = nearest(given, known) if isinstance(given, str) and known else "correct the value"
        return f"must be {context.get('expected')}, not {_shown(given)}", remedy
    if kind in ("too_short", "too_long"):
        limit = context["min_length"] if kind == "too_short" else context["max_length"]
        if kind == "too_short" and limit == 1:
            return "must not be empty", "give at least one entry"
        side = "at least" if kind == "too_short" else "at most"
        return f"must have {side} {limit} entries, not {context['actual_length']}", "correct the list"
    if kind == "value_error":
        # What refuses values may say what to do about it: "problem; remedy".
        what, _, remedy = item["msg"].removeprefix("Value error, ").partition("; ")
        return what, remedy or "correct the values there"
    if kind == "string_pattern_mismatch":
        remedy = "use letters, digits, '.', '_' and '-', starting with a letter or a digit (64 at most)"
        return f"{given!r} is not usable as a name", remedy
    what = re.sub(r"^(Input|Value|String|List|Tuple|Dictionary) should", "must", item["msg"])
    return f"{what}, not {_shown(given)}", "correct the value"


def _shown(value: Any) -> str:
    match value:
        case None:
            return "empty (null)"
        case bool():
            return str(value).lower()
        case int() | float():
            return f"the number {value!r}"
        case str():
            return repr(value if len(value) <= 60 else value[:57] + "...")
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list"
    return type(value).__name__


def _below(annotation: Any, part: str | int) -> list[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _below(get_args(annotation)[0], part)
    if origin in (Union, types.UnionType):
        return [inner for choice in get_args(annotation) for inner in _below(choice, part)]
    if origin is dict:
        return [get_args(annotation)[1]]
    if origin in (list, tuple):
        return [get_args(annotation)[0]]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [
            field.annotation
            for name, field in annotation.model_fields.items()
            if part == (field.alias or name)
        ]
    return []


def _fields(annotation: Any) -> list[str]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _fields(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [name for choice in get_args(annotation) for name in _fields(choice)]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [field.alias or name for name, field in annotation.model_fields.items()]
    return []
