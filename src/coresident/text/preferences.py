"""Preference files: one JSON object a line with prompt, chosen and rejected, as TRL reads them.

Each of the three is a string, or each is a list of chat messages (objects with `role` and `content`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coresident.errors import UserError
from coresident.text.lines import Messages, entries, side

FIELDS = ("prompt", "chosen", "rejected")


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
    found = entries(path, "preference pair", "prompt, chosen and rejected")
    return [_pair(entry, origin) for entry, origin in found]


def _pair(entry: Mapping[str, Any], origin: str) -> Pair:
    for field in FIELDS:
        if field not in entry:
            raise UserError(f"{origin}: {field!r} is missing", "give every line prompt, chosen and rejected")
    prompt, chosen, rejected = (side(entry[field], field, origin) for field in FIELDS)
    if not isinstance(prompt, str) == isinstance(chosen, str) == isinstance(rejected, str):
        raise UserError(
            f"{origin}: text and chat messages are mixed", "write all three as text or all three as messages"
        )
    return Pair(prompt, chosen, rejected, origin)
