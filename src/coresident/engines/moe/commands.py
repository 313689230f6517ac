"""`coresident moe layout` and `coresident moe generate`: the engine as a tool, without a lab."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from coresident.engines.moe import assemble
from coresident.engines.moe.decoder.sampling import Sampling
from coresident.engines.moe.generate import generate as decode
from coresident.engines.moe.layout import file, writer
from coresident.engines.moe.layout.record import RecordFormat
from coresident.engines.moe.models.checkpoint import open_checkpoint
from coresident.engines.moe.models.origins import Files
from coresident.engines.moe.parameters import Decode
from coresident.errors import UserError

Progress = Callable[[int, int], None]
# Tokens where nobody says how many.
USUAL = 128


def layout(model: Path, out: Path, encoding: Literal["stored", "q4"], progress: Progress) -> dict[str, Any]:
    """Write a model's experts as records; goes on where an earlier call was interrupted."""
    origin = Files(open_checkpoint(model))
    found = origin.architecture
    kind: Any = "Q4" if encoding == "q4" else origin.encoding
    form = RecordFormat(found.width, found.expert_width, kind)
    start = time.monotonic()
    written = writer.write(origin, form, out, progress)
    return {**_told(written), "seconds": time.monotonic() - start}


def check(model: Path | None, out: Path, progress: Progress) -> dict[str, Any]:
    """Compare every record with its checksum, and the header with the model. Raises UserError naming what is wrong."""
    found = file.open_layout(out)
    if model is not None:
        found.belongs(open_checkpoint(model).identity)
    file.check(found, progress)
    return {**_told(found), "checked": found.header.layers * found.header.experts}


@dataclass(frozen=True)
class Asked:
    """What a text is generated from: `prompts`, as a user's message if `chat`; `stops` are tokens by their text. At most `most`
    tokens (None: 128, or as many as the context has room for).
    """

    prompts: tuple[str, ...]
    most: int | None = None
    chat: bool = False
    stops: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)


def generate(
    settings: Decode,
    asked: Asked,
    device: str,
    show: Callable[[int, str], None],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Generate text after each prompt; `show` gets each text's new pieces as they come.

    Raises UserError for prompts beyond the context, a model without a tokenizer, and all that `assemble.build` refuses.
    """
    from coresident.text import tokenizer

    if settings.model.path is None:
        raise UserError(
            "moe generate: a model of random weights says nothing", "give a directory with weights"
        )
    path = Path(settings.model.path)
    origin = assemble.open_model(settings.model)
    known = tokenizer.load(path)
    prompts = [_tokens(known, prompt, asked.chat) for prompt in asked.prompts]
    ends = {*origin.architecture.ends, known.eos_token_id, *(_token(known, text) for text in asked.stops)}
    longest = max(map(len, prompts))
    room = origin.architecture.context - longest
    most = max(1, min(USUAL, room)) if asked.most is None else asked.most
    if most > room:
        raise UserError(
            f"a prompt of {longest} tokens and {most} more are beyond the model's context of {room + longest}",
            "give a shorter prompt, or a smaller --max-tokens",
        )
    place = assemble.device_of(device)
    start = time.monotonic()
    engine = assemble.build(settings, origin, place, longest + most, len(prompts), say)
    try:
        engine.decoder.warm(len(prompts))
        loaded = time.monotonic() - start
        texts = [Text(known, lambda piece, row=row: show(row, piece), ends) for row in range(len(prompts))]  # type: ignore[misc]
        installed = engine.slots.installs
        found = decode(
            engine.decoder,
            prompts,
            most,
            asked.sampling,
            ends,
            lambda row, token: texts[row].add(token),
        )
        for text in texts:
            text.finish()
        tokens = sum(found.step_rows)
        seconds = sum(found.step_seconds)
        generated = found.tokens
        return {
            "text": texts[0].text if len(texts) == 1 else [text.text for text in texts],
            "token_ids": generated[0] if len(texts) == 1 else generated,
            "prompt_tokens": sum(map(len, prompts)),
            "tokens_per_second": tokens / seconds if seconds else None,
            "prefill_seconds": found.prefill_seconds,
            "load_seconds": loaded,
            "hit_rate": found.hits / found.accesses if found.accesses else None,
            "bytes_per_token": (found.accesses - found.hits) * engine.form.payload / tokens
            if tokens
            else None,
            "installs": engine.slots.installs - installed,
            "slots": list(engine.cache.capacities),
            "experts": engine.origin.experts,
            "slots_bytes": engine.slots.nbytes,
            "encoding": engine.form.encoding,
            "tier": settings.tier,
            "policy": settings.policy,
            "device": str(place),
        }
    finally:
        engine.close()


class Text:
    """One row's text as it grows: pieces are shown once no later token can change them."""

    def __init__(self, known: Any, show: Callable[[str], None], ends: set[int]) -> None:
        self.text = ""
        self._known, self._show, self._ends = known, show, ends
        self._tokens: list[int] = []

    def add(self, token: int) -> bool:
        """Take the next token; a stop token is no part of the text. False: goes on."""
        if token not in self._ends:
            self._tokens.append(token)
            self._grow(final=False)
        return False

    def finish(self) -> None:
        """Show what was held back."""
        self._grow(final=True)

    def _grow(self, final: bool) -> None:
        whole = self._known.decode(self._tokens, skip_special_tokens=True)
        # A character of several bytes may be half here.
        if not final and whole.endswith("\ufffd"):
            return
        if whole.startswith(self.text):
            piece, self.text = whole[len(self.text) :], whole
            if piece:
                self._show(piece)
        elif final:
            # The tokenizer has changed what was shown, as those do that tidy spaces.
            self.text = whole


def _tokens(known: Any, prompt: str, chat: bool) -> list[int]:
    if not chat:
        tokens: Sequence[int] = known(prompt)["input_ids"]
    elif known.chat_template is None:
        raise UserError("the tokenizer has no chat template", "leave out --chat")
    else:
        from jinja2 import TemplateError

        try:
            text = known.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise UserError(
                f"the tokenizer's chat template fails: {' '.join(str(error).split())}",
                "leave out --chat, or copy the tokenizer's files again from their source",
            ) from None
        tokens = known(text, add_special_tokens=False)["input_ids"]
    if not tokens:
        raise UserError("the prompt is empty", "give --prompt some text")
    return list(tokens)


def _token(known: Any, text: str) -> int:
    found = known.convert_tokens_to_ids(text)
    if found is None or found == known.unk_token_id:
        tokens = known(text, add_special_tokens=False)["input_ids"]
        if len(tokens) != 1:
            raise UserError(
                f"--stop {text!r} is {len(tokens)} tokens, not one",
                "give a text that is one token, such as <|im_end|>",
            )
        found = tokens[0]
    return int(found)


def _told(found: file.LayoutFile) -> dict[str, Any]:
    header = found.header
    return {
        "layout": str(found.path),
        "records": header.layers * header.experts,
        "record_bytes": header.form.size,
        "encoding": header.form.encoding,
        "bytes": header.size,
        "model": header.model,
    }
