"""What a token cache holds, in one JSON file: whoever has the same manifest has the same tokens.

Its identity is the SHA-256 of its own sorted JSON (without the identity), so that a changed count or checksum is seen, and two
caches with the same tokens and tokenizer are the same one wherever and with however many workers they were made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from coresident.errors import UserError
from coresident.workload import Parameters

FILE = "manifest.json"
TOKENIZER = "tokenizer"
FORMAT: Literal[1] = 1
NAMED = "name the --out of a `coresident pretrain prepare`, which makes a new directory"

Count = Annotated[int, Field(ge=0)]


class Shard(Parameters):
    """A file of little-endian uint16 tokens."""

    file: str
    tokens: Annotated[int, Field(ge=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class FamilySplit(Parameters):
    """One family's tokens in one split: how many documents they came from, and in which shards they are, in order."""

    split: Literal["train", "validation"]
    family: str
    documents: Count
    tokens: Count
    shards: Annotated[tuple[Shard, ...], Field(strict=False)] = ()


class Manifest(Parameters):
    """A token cache's content. `tokenizer` maps the tokenizer's files to their SHA-256; `end` ends every document."""

    format: Literal[1] = FORMAT
    vocabulary: Annotated[int, Field(ge=2, le=1 << 16)]
    end: Count
    tokenizer: Mapping[str, str]
    streams: Annotated[tuple[FamilySplit, ...], Field(strict=False)]

    @property
    def families(self) -> tuple[str, ...]:
        """All families, in the order of the streams."""
        return tuple(dict.fromkeys(stream.family for stream in self.streams))

    @property
    def identity(self) -> str:
        """SHA-256 (hex) of the sorted JSON."""
        return hashlib.sha256(_sorted_json(self.model_dump(mode="json"))).hexdigest()


def render(manifest: Manifest) -> bytes:
    """The file's content: the manifest with its identity."""
    described = {"identity": manifest.identity, **manifest.model_dump(mode="json")}
    return json.dumps(described, indent=1, sort_keys=True).encode() + b"\n"


def read(path: Path) -> Manifest:
    """The manifest of the cache in `path`. Raises UserError where there is none, or where it is not what it was."""
    file = path / FILE
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is not a token cache: it is no directory", NAMED)
    if not file.is_file() and path.is_dir() and any(path.iterdir()):
        raise UserError(f"{path} is not a token cache: it has no {FILE}", NAMED)
    if not file.is_file():
        partial = path.with_name(f"{path.name}.partial")
        found = "is unfinished" if partial.is_dir() and not path.exists() else "is not a token cache"
        raise UserError(
            f"{path} {found}: it has no {FILE}", f"make one: coresident pretrain prepare --out {path}"
        )
    try:
        described: dict[str, Any] = json.loads(file.read_bytes())
        said = described.pop("identity")
        if described.get("format") != FORMAT:
            raise UserError(
                f"{file} is of format {described.get('format')!r}, and this version reads {FORMAT}",
                "prepare the cache again with this version",
            )
        manifest = Manifest.model_validate_json(json.dumps(described))
    except (ValueError, KeyError, AttributeError, TypeError, ValidationError):
        raise UserError(
            f"{file} is not a token cache's manifest", "prepare the cache again, or copy it again whole"
        ) from None
    if manifest.identity != said:
        raise UserError(
            f"{file} was changed: its content is not what its identity says",
            "prepare the cache again, or copy it again whole",
        )
    return manifest


def _sorted_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
