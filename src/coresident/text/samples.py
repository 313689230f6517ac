"""Files of texts to imitate: one JSON object a line, in the forms that TRL's SFTTrainer reads.

`prompt` with `completion` (both text or both chat messages; only the completion is learned), `messages` (a whole
chat, all of it learned) or `text` (all of it learned).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coresident.errors import UserError
from coresident.text.lines import Messages, entries, side

FORMS = "prompt and completion, or messages, or text"


@dataclass(frozen=True)
class Sample:
    """A completion to imitate after a prompt (None: there is none, and everything is imitated): strings, or
    sequences of chat messages. `origin` says where it comes from, for errors.
    """

    prompt: str | Messages | None
    completion: str | Messages
    origin: str = ""


def read(path: Path) -> list[Sample]:
    """All samples of a JSONL file, in order; blank lines are skipped. Raises UserError naming file and line."""
    return [_sample(entry, origin) for entry, origin in entries(path, "sample", FORMS)]


def _sample(entry: Mapping[str, Any], origin: str) -> Sample:
    forms = [name for name in ("prompt", "messages", "text") if name in entry]
    if len(forms) != 1:
        said = " and ".join(map(repr, forms)) or "none of 'prompt', 'messages' and 'text'"
        raise UserError(f"{origin}: it has {said}", f"give every line one form: {FORMS}")
    if forms == ["prompt"]:
        if "completion" not in entry:
            raise UserError(f"{origin}: 'completion' is missing", "give every prompt its completion")
        prompt, completion = (side(entry[field], field, origin) for field in ("prompt", "completion"))
        if isinstance(prompt, str) != isinstance(completion, str):
            raise UserError(
                f"{origin}: text and chat messages are mixed", "write both as text or both as messages"
            )
        return Sample(prompt, completion, origin)
    whole = side(entry[forms[0]], forms[0], origin)
    if isinstance(whole, str) != (forms == ["text"]):
        raise UserError(
            f"{origin}: {forms[0]!r} is of the wrong kind", "write `text` as a string, `messages` as a list"
        )
    return Sample(None, whole, origin)
