"""The prompts that are traced: each of a family, and each on one side of the split between fit and held-out.

A predictor that has seen a prompt's routing is not judged on it. The split goes by prompt, within each family, and by the
text's own hash: it depends neither on the order of a file nor on who else is in it by more than one place.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from coresident.engines.moe.traces.manifest import Split
from coresident.errors import UserError
from coresident.text.lines import entries

_FIELDS = "`prompt`, `family` and, if you like, `split` (fit or held-out)"
_FAMILY = re.compile(r"[a-z0-9][a-z0-9_-]*")


@dataclass(frozen=True)
class Prompt:
    """A text to go on from, its family, and its side of the split (None: the hash decides). `name` is unique in its set."""

    name: str
    family: str
    text: str
    split: Split | None = None


def read(path: Path) -> list[Prompt]:
    """The prompts of a JSONL file. Raises UserError naming file and line."""
    found = [_prompt(entry, origin) for entry, origin in entries(path, "prompt", _FIELDS)]
    return [replace(one, name=f"{one.family}-{index:03}") for index, one in enumerate(found)]


def write(prompts: Iterable[Prompt], path: Path) -> None:
    """The same as a JSONL file that `read` reads."""
    lines = [
        {"prompt": one.text, "family": one.family} | ({} if one.split is None else {"split": one.split})
        for one in prompts
    ]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def divided(prompts: Sequence[Prompt], held_out: float = 0.5) -> list[Prompt]:
    """The prompts with every one's split: of each family, the share `held_out` of those that do not say it themselves.

    Raises UserError where equal texts ask for different splits; equal texts that ask for none get the same one.
    """
    if not 0 <= held_out <= 1:
        raise UserError(f"a share of {held_out:g} cannot be held out", "give 0 to 1, such as 0.5")
    asked: dict[str, Split] = {}
    for one in prompts:
        if one.split is not None and asked.setdefault(one.text, one.split) != one.split:
            raise UserError(
                f"the prompt {one.text[:40]!r} is both fit and held-out", "give equal prompts one split"
            )
    decided: dict[str, Split] = dict(asked)
    for family in dict.fromkeys(one.family for one in prompts):
        open_ = {one.text for one in prompts if one.family == family} - set(decided)
        ordered = sorted(open_, key=lambda text: hashlib.sha256(text.encode()).digest())
        held = round(held_out * len(ordered))
        decided |= {text: "held-out" if index < held else "fit" for index, text in enumerate(ordered)}
    return [replace(one, split=decided[one.text]) for one in prompts]


def _prompt(entry: dict[str, Any], origin: str) -> Prompt:
    text, family, split = entry.get("prompt"), entry.get("family"), entry.get("split")
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{origin}: 'prompt' is not a text", f"give every line {_FIELDS}")
    if not isinstance(family, str) or not _FAMILY.fullmatch(family):
        raise UserError(
            f"{origin}: 'family' is not a name in small letters", f"give every line {_FIELDS}, such as code"
        )
    if split is not None and split not in get_args(Split):
        raise UserError(f"{origin}: 'split' is {split!r}", "write fit or held-out, or leave it out")
    if unknown := set(entry) - {"prompt", "family", "split"}:
        raise UserError(f"{origin}: the key {min(unknown)!r} is unknown", f"give every line {_FIELDS}")
    return Prompt("", family, text, split)
