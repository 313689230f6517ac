"""Reading YAML so that every later complaint can name the file, the key and the line.

YAML 1.2 by ruamel.yaml, restricted to what a study needs: mappings with string keys, lists, and the core
scalars (null, booleans, finite numbers, strings). Duplicate keys, dates, tags and merge keys are refused or
read as plain text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from coresident.errors import UserError

Path = tuple[str | int, ...]

# Aliases may repeat a node many times over; more nodes than this is an attack or an accident.
MAX_NODES = 200_000
_CORE = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str")}
_QUOTE = "put the value in quotes if it is meant as text"


def dotted(path: Sequence[str | int]) -> str:
    """A path as people write it.

    >>> dotted(("factors", "learners", 0))
    'factors.learners[0]'
    """
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


NOTHING = object()


def below(value: Any, part: str | int) -> Any:
    """What stands at a key or a position of a plain value; `NOTHING` if there is none."""
    if isinstance(value, dict):
        return value.get(part, NOTHING)
    if isinstance(value, list | tuple) and isinstance(part, int) and 0 <= part < len(value):
        return value[part]
    return NOTHING


@dataclass(frozen=True)
class Source:
    """Where values came from: a file's name, the line of each key, and the `--set` that put a key there."""

    origin: str
    lines: dict[Path, int] = field(default_factory=dict)
    overrides: dict[Path, str] = field(default_factory=dict)

    def where(self, path: Sequence[str | int]) -> str:
        """`FILE: key.path (line N)`, or `--set K=V: key.path`; the nearest known parent's line where it has
        none.
        """
        key = dotted(path)
        for length in range(len(path), 0, -1):
            known = tuple(path[:length])
            if known in self.overrides:
                return f"--set {self.overrides[known]}: {key}"
            if known in self.lines:
                return f"{self.origin}: {key} (line {self.lines[known]})"
        return f"{self.origin}: {key}" if key else self.origin

    def line(self, path: Sequence[str | int]) -> int:
        """The line of a path for sorting complaints: overrides after the file, unknown paths first."""
        for length in range(len(path), 0, -1):
            known = tuple(path[:length])
            if known in self.overrides:
                return 1_000_000_000
            if known in self.lines:
                return self.lines[known]
        return 0


def read(text: str, origin: str) -> tuple[Any, Source]:
    """The plain value (dict, list, str, bool, int, float, None) of a YAML text, and where each part of it
    stands.

    Raises `UserError` naming `origin` and the line: not YAML, a duplicate key, a key that is no string, a
    number that is not finite, a tag, or nesting without end.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("%"):
            raise UserError(
                f"{origin}: line {number}: directive {line.split()[0]!r} is not supported", "remove that line"
            )
    yaml = YAML(typ="safe", pure=True)
    source = Source(origin)
    try:
        node = yaml.compose(StringIO(text))
        value = None if node is None else _Reader(yaml, source).value(node, (), ())
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f"line {mark.line + 1}: "
        what = " ".join(str(part) for part in (error.context, error.problem) if part)
        raise UserError(
            f"{origin}: {line}not YAML: {what}", "correct the syntax there, or just before"
        ) from None
    except YAMLError as error:
        what = str(error).splitlines()[0]
        raise UserError(f"{origin}: not YAML: {what}", "save the file as plain UTF-8 text") from None
    except RecursionError:
        raise UserError(f"{origin}: nested too deeply", "a study needs only a few levels") from None
    return value, source


class _Reader:
    """Turns ruamel's nodes into plain values while noting the line of each path."""

    def __init__(self, yaml: YAML, source: Source) -> None:
        self._yaml = yaml
        self._source = source
        self._nodes = 0

    def value(self, node: Node, path: Path, above: tuple[int, ...]) -> Any:
        self._nodes += 1
        # A list item has a line of its own; a key's line was noted with the key.
        self._source.lines.setdefault(path, node.start_mark.line + 1)
        if id(node) in above or self._nodes > MAX_NODES:
            raise self._wrong(node, path, "an alias (*) repeats without end", "write the value out")
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        if not str(node.tag).startswith("tag:yaml.org,2002:"):
            raise self._wrong(node, path, f"tag {node.tag} is not supported", "remove the tag")
        if isinstance(node, SequenceNode):
            return [self.value(item, (*path, at), (*above, id(node))) for at, item in enumerate(node.value)]
        assert isinstance(node, MappingNode)
        return self._mapping(node, path, above)

    def _mapping(self, node: MappingNode, path: Path, above: tuple[int, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                text = key_node.value if isinstance(key_node, ScalarNode) else "a collection"
                remedy = "write merged keys out" if text == "<<" else "put the key in quotes"
                raise self._wrong(key_node, path, f"key {text!s} is not a string", remedy)
            key = str(key_node.value)
            at = (*path, key)
            if key in result:
                first = self._source.lines[at]
                raise self._wrong(
                    key_node, at, f"duplicate key {key!r}, first on line {first}", "remove one of them"
                )
            self._source.lines[at] = key_node.start_mark.line + 1
            result[key] = self.value(value_node, at, (*above, id(node)))
        return result

    def _scalar(self, node: ScalarNode, path: Path) -> Any:
        # YAML 1.2's core schema has no dates: what looks like one is text.
        if node.tag == "tag:yaml.org,2002:timestamp":
            return str(node.value)
        if node.tag not in _CORE:
            raise self._wrong(node, path, f"tag {node.tag} is not supported", _QUOTE)
        try:
            value = self._yaml.constructor.construct_object(node)
        except ValueError:
            raise self._wrong(node, path, f"{node.value!r} cannot be read as its tag says", _QUOTE) from None
        if isinstance(value, float) and not math.isfinite(value):
            raise self._wrong(
                node, path, f"{node.value} is not a finite number", f"give a finite number; {_QUOTE}"
            )
        return value

    def _wrong(self, node: Node, path: Path, what: str, remedy: str) -> UserError:
        key = f"{dotted(path)} " if path else ""
        return UserError(f"{self._source.origin}: {key}(line {node.start_mark.line + 1}): {what}", remedy)


def render(value: Mapping[str, Any]) -> str:
    """A plain value as YAML that `read` gives back unchanged."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.width = 110
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = StringIO()
    yaml.dump(dict(value), stream)
    return stream.getvalue()
