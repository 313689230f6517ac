"""A corpus that every machine has: the sources of Python's own library, and the prose in and about them.

Code is a module's source as it is; prose is the language reference (`pydoc_data.topics`) and each module's docstrings.
Both go by the module's name, so that a module held out for validation is held out with its docstrings.
"""

from __future__ import annotations

import ast
import hashlib
import io
import os
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from coresident.errors import MachineError
from coresident.text import pythondocs

# `pydoc_data` is the language reference again, as one large literal.
_NOT_CODE = frozenset({"site-packages", "dist-packages", "__pycache__", "pydoc_data"})

_TESTS = frozenset({"test", "tests", "idle_test"})


def texts(family: str, packages: bool) -> Iterator[tuple[str, str]]:
    """(text, module) of every document of `code` or `prose`, each text once, none of them empty.

    Modules come in an order that their names' hashes give, so that the first megabytes are a sample of all.
    """
    seen: set[bytes] = set()
    for text, module in _code(packages) if family == "code" else _prose(packages):
        digest = hashlib.sha256(text.encode()).digest()
        if text and digest not in seen:
            seen.add(digest)
            yield text, module


def _code(packages: bool) -> Iterator[tuple[str, str]]:
    for path, module in _modules(packages):
        text = _source(path)
        if text is not None:
            yield text, module


def _prose(packages: bool) -> Iterator[tuple[str, str]]:
    for number, topic in enumerate(pythondocs.corpus()):
        yield topic, f"topic {number}"
    for path, module in _modules(packages):
        # Tests say little about themselves, and are half of all there is to parse.
        text = None if _TESTS & set(module.split("/")) else _source(path)
        if text is not None:
            yield "\n\n".join(_docstrings(text)), module


def _modules(packages: bool) -> list[tuple[Path, str]]:
    """Every module's file and its name, which says nothing of where this machine keeps it."""
    places = sysconfig.get_paths()
    roots = [places["stdlib"]] + ([places["purelib"], places["platlib"]] if packages else [])
    found: dict[str, Path] = {}
    for number, root in enumerate(dict.fromkeys(roots)):
        for directory, below, names in os.walk(root):
            below[:] = [name for name in below if name not in _NOT_CODE]
            for name in names:
                path = Path(directory, name)
                if name.endswith(".py") and path.is_file():
                    found.setdefault(f"{min(number, 1)}/{path.relative_to(root).as_posix()}", path)
    if not found:
        raise MachineError(
            f"there are no sources of Python in {roots[0]}", "give texts of your own (source.kind=files)"
        )
    names_in_order = sorted(found, key=lambda name: (hashlib.sha256(name.encode()).digest(), name))
    return [(found[name], name) for name in names_in_order]


def _source(path: Path) -> str | None:
    """A module's text; None for what is a test's deliberately broken file."""
    content = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return None
    return text if "\0" not in text and _encodable(text) else None


def _docstrings(text: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    yield from _within(module)


def _within(node: ast.stmt | ast.Module) -> Iterator[str]:
    """The docstrings of a statement's own body, and of the functions and classes in it."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        said = ast.get_docstring(node)
        if said and _encodable(said):
            yield said
    for statement in getattr(node, "body", ()):
        yield from _within(statement)


def _encodable(text: str) -> bool:
    """Without halves of surrogate pairs, which no UTF-8 has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
