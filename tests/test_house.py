"""The house: no two files import each other, by whatever way round, imports for types and late ones included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import coresident

ROOT = Path(coresident.__file__).parent


def imported(file: Path, known: set[str]) -> Iterator[str]:
    """The project's modules that a file names in an import."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{one.name}" for one in node.names]
            found = [one for one in inner if one in known]
            yield from found
            if len(found) < len(inner) and node.module in known:
                yield node.module


def test_imports_run_one_way() -> None:
    modules = {
        ".".join(("coresident", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): file
        for file in ROOT.rglob("*.py")
    }
    assert len(modules) > 300
    graph = {name: set(imported(file, set(modules))) - {name} for name, file in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"these import one another: {' <- '.join(error.args[1])}") from None
