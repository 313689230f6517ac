"""What text there is: documents, each of a family (code, prose, ...) and either for training or for validation.

Three kinds of source give the same stream: Python's own sources and documentation (on every machine, no download), files,
and a dataset of the Hugging Face hub. The order is fixed by the source alone, and whether a document is held out for
validation by its own content (or its module's name), so neither depends on who reads, how often, or up to which limit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from coresident.errors import UserError
from coresident.workload import Parameters

Paths = Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
Family = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]*$")]


@dataclass(frozen=True)
class Document:
    """A text, its family, and whether it is held out for validation."""

    text: str
    family: str
    validation: bool


class CorpusSource(Parameters):
    """Where documents come from.

    `python`: the sources of Python's standard library (family `code`) and its documentation and docstrings (`prose`);
    `packages` adds every package that is installed beside us, some hundred megabytes where torch is.
    `files`: `files: {family: [file or directory, ...]}`; a file is plain text (one document, or as many as `separator`
    divides it into), or `.jsonl` or C4-style `.json.gz`, whose objects have the text in `field`.
    `hub`: a dataset such as `allenai/c4` with its `subset` `en`, where there is a network.

    `limit` is the bytes of text (UTF-8) that a family gives at most; the document that reaches it is the last.
    Validation is what `validation` (files) or the hub's own validation split holds, or else a `validation_share` of
    the documents.
    """

    kind: Literal["python", "files", "hub"] = "python"
    packages: bool = False
    files: Mapping[Family, Paths] = {}
    validation: Mapping[Family, Paths] = {}
    field: str = "text"
    separator: str | None = None
    dataset: str | None = None
    subset: str | None = None
    family: Family = "web"
    limit: Annotated[int, Field(ge=1)] | None = None
    validation_share: Annotated[float, Field(ge=0, le=0.5)] = 0.01

    @model_validator(mode="after")
    def _what_the_kind_needs(self) -> Self:
        if (self.kind == "files") != bool(self.files):
            raise ValueError("files: needed by kind `files`, and by no other")
        if (self.kind == "hub") != bool(self.dataset):
            raise ValueError("dataset: needed by kind `hub`, and by no other")
        if unknown := set(self.validation) - set(self.files):
            raise ValueError(f"validation: {min(unknown)} is no family of `files`")
        trained = [_resolved(one) for paths in self.files.values() for one in paths]
        for one in (one for paths in self.validation.values() for one in paths):
            held = _resolved(one)
            if any(held.is_relative_to(other) or other.is_relative_to(held) for other in trained):
                raise ValueError(f"validation: {one} is trained on too")
        if self.separator == "":
            raise ValueError("separator: empty; leave it out where a file is one document")
        return self


def _resolved(path: str) -> Path:
    """Where a path leads, under whichever name it was given."""
    try:
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be resolved: {error}") from None


def families(source: CorpusSource) -> tuple[str, ...]:
    """The families that a source has, in their order."""
    if source.kind == "python":
        return ("code", "prose")
    return tuple(sorted(source.files)) if source.kind == "files" else (source.family,)


def left_out(source: CorpusSource) -> dict[str, dict[str, int]]:
    """By family and suffix, how many files in a source's directories are of kinds that are not read; only what there is."""
    from coresident.text import files

    found = {
        family: files.left_out((*source.files[family], *source.validation.get(family, ())))
        for family in sorted(source.files)
    }
    return {family: dict(counts.most_common()) for family, counts in found.items() if counts}


def documents(source: CorpusSource, family: str | None = None) -> Iterator[Document]:
    """All documents of one family, or of one family after the other. The same source gives the same documents in the same
    order. Raises UserError naming the file (and line) that cannot be read as text.
    """
    for one in (family,) if family is not None else families(source):
        yield from _family(source, one)


def _family(source: CorpusSource, family: str) -> Iterator[Document]:
    empty = True
    for document in _found(source, family):
        empty = empty and not document.text
        yield document
    if empty:
        raise UserError(
            f"source: there is no text of family {family!r}",
            "give files that hold text, or leave the family out",
        )


def _found(source: CorpusSource, family: str) -> Iterator[Document]:
    if source.kind == "python":
        from coresident.text import pythonsources

        for text, module in _limited(source, pythonsources.texts(family, source.packages)):
            yield Document(text, family, _held_out(module, source.validation_share))
        return
    for text, validation in _streams(source, family):
        yield Document(text, family, validation)


def _streams(source: CorpusSource, family: str) -> Iterator[tuple[str, bool]]:
    from coresident.text import c4, files

    if source.kind == "files":
        own = files.texts(source.files[family], source.field, source.separator)
        apart = source.validation.get(family)
        held = files.texts(apart, source.field, source.separator) if apart else None
        anywhere = bool(source.validation)
    else:
        assert source.dataset is not None
        own, held = c4.hub(source.dataset, source.subset, source.field)
        anywhere = held is not None
    # Once a source says what its validation is, nothing of its training text is held out.
    share = 0.0 if anywhere else source.validation_share
    for text, _ in _limited(source, ((text, "") for text in own)):
        yield text, _held_out(text, share)
    for text, _ in _limited(source, ((text, "") for text in held or ())):
        yield text, True


def _limited(source: CorpusSource, found: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    size = 0
    for text, name in found:
        yield text, name
        size += len(text.encode())
        if source.limit is not None and size >= source.limit:
            return


def _held_out(key: str, share: float) -> bool:
    """By the key's hash: equal documents fall to the same side, and one more document moves no other."""
    digest = hashlib.sha256(b"validation/" + key.encode()).digest()
    return int.from_bytes(digest[:8], "big") < int(share * 2**64)
