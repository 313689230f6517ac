"""A study file and its `--set` overrides, read, typed and checked before anything else happens."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coresident.errors import UserError
from coresident.lab.study import library
from coresident.lab.study.explain import explain
from coresident.lab.study.overrides import apply
from coresident.lab.study.schema import Study
from coresident.lab.study.source import Source, read, render


@dataclass(frozen=True)
class Loaded:
    """A valid study with what it was read from.

    `raw` is the plain content with overrides applied; `text` is YAML of exactly that: the file's own text,
    comments included, or a rendering where overrides changed it. `source` names lines for later complaints.
    """

    study: Study
    raw: dict[str, Any]
    origin: str
    text: str
    source: Source


def load(source: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """The study in a YAML file, or the shipped study of that name, with `--set` overrides applied.

    Raises `UserError` naming file (or `--set`), key path and line, with the nearest key where one is unknown.
    """
    path = library.find(source)
    text = read_text(path)
    return load_text(text, str(path), overrides)


def load_text(
    text: str, origin: str, overrides: Sequence[str] = (), values: Mapping[str, Any] | None = None
) -> Loaded:
    """Like `load`, for a text that is at hand; `origin` names it. `values` replace top-level keys as they
    are.
    """
    raw, where = read(text, origin)
    if not isinstance(raw, dict):
        raise UserError(
            f"{origin}: a study is a mapping of keys to values", "start from `coresident init NAME`"
        )
    raw.update(copy.deepcopy(dict(values or {})))
    apply(raw, where, overrides)
    try:
        study = Study.model_validate(raw)
    except ValidationError as error:
        raise explain(error, Study, raw, where.where, where.line) from None
    unchanged = not overrides and not values
    return Loaded(study=study, raw=raw, origin=origin, text=text if unchanged else render(raw), source=where)


def read_text(path: Path) -> str:
    """A text file's content; `UserError` names the file if it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})", "save the file as UTF-8") from None
    except OSError as error:
        reason = (error.strerror or "unknown error").lower()
        raise UserError(f"{path}: cannot be read: {reason}", "give a readable study file") from None
