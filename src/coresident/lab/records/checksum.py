"""The checksum in a record's file: what was edited later, or lost a bit on the disk, is noticed when it is read.

It is the SHA-256 of the canonical JSON of all the rest, so that it holds however the file is laid out. It tells a change
from what was measured, not a forger: who means to can write a checksum that fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from coresident.lab.records import strict
from coresident.lab.study.cells import digest

KEY: Final = "checksum"


def sealed(content: Mapping[str, Any]) -> bytes:
    """The JSON line of `content`, with the checksum as its last key. Raises `ValueError` for what JSON has not."""
    # Of what a reader will find: in JSON a tuple is a list, and a number that is a key is a text.
    rest = strict.parse(strict.render(content))
    return strict.render({**rest, KEY: digest(rest)})


def broken(content: Mapping[str, Any], required: bool) -> str:
    """What is wrong with the checksum in `content` as it was parsed, "" where it fits.

    One that is absent is wrong where it is `required`, as it is of every version that writes it.
    """
    if KEY not in content:
        return "it has no checksum" if required else ""
    rest = {key: value for key, value in content.items() if key != KEY}
    return "" if digest(rest) == content[KEY] else "its checksum does not fit its content"
