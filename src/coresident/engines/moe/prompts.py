"""What `moe.decode` decodes after: texts, drawn tokens, or the prompts of a trace with the tokens and routing that followed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coresident.engines.moe.decoder.decoder import check_prompt
from coresident.engines.moe.models.origins import Files, Origin
from coresident.engines.moe.parameters import Decode
from coresident.errors import UserError


@dataclass(frozen=True)
class Prompted:
    """Prompts as tokens; `forced` [B, T] are the tokens to go on with (None: the decoder's own), `logits` [B, T', L, E] the
    router's at every position. `split` says which part of its source the text is from.
    """

    prompts: list[list[int]]
    split: str
    forced: Tensor | None = None
    logits: Tensor | None = None


def prompts_of(asked: Decode, origin: Origin) -> Prompted:
    """The prompts that are asked for. Raises UserError for texts without a tokenizer, and for traces of another shape."""
    if asked.trace is not None:
        return _traced(asked, origin, Path(asked.trace).expanduser())
    wanted = asked.prompts
    if wanted.text or wanted.source != "drawn":
        return _texts(asked, origin)
    generator = torch.Generator().manual_seed(wanted.seed)
    size = (wanted.batch, wanted.length + _followed(asked))
    drawn = torch.randint(0, origin.architecture.vocabulary, size, generator=generator)
    return _parted(drawn.tolist(), asked, origin, "drawn")


def _texts(asked: Decode, origin: Origin) -> Prompted:
    from coresident.text import tokenizer

    wanted = asked.prompts
    if not isinstance(origin, Files):
        raise UserError("random weights have no tokenizer for texts", "set prompts.source: drawn")
    known = tokenizer.load(origin.checkpoint.path)
    if wanted.text:
        return _parted([known(text)["input_ids"] for text in wanted.text], asked, origin, "given")
    # A text that ends before the decoding does cannot be followed.
    least = wanted.length + _followed(asked) if wanted.follow else 1
    found: list[list[int]] = []
    for text in _held_out(wanted.source):
        tokens = known(text)["input_ids"]
        if len(tokens) >= least:
            found.append(tokens)
        if len(found) == wanted.seed + wanted.batch:
            return _parted(found[wanted.seed :], asked, origin, "held-out")
    long = f" of {least} tokens or more" if wanted.follow else ""
    fewer = ", ask for fewer tokens" if wanted.follow else ""
    raise UserError(
        f"{wanted.source} holds out {len(found)} texts{long}",
        f"set a smaller prompts.seed or prompts.batch{fewer}",
    )


def _held_out(source: str) -> Iterator[str]:
    from coresident.text.corpus import CorpusSource, documents

    family = {"python-docs": "prose", "python-sources": "code"}[source]
    return (one.text for one in documents(CorpusSource()) if one.validation and one.family == family)


def _followed(asked: Decode) -> int:
    """How many tokens of a text are decoded rather than read."""
    return asked.warmup + asked.tokens if asked.prompts.follow else 0


def _parted(texts: list[list[int]], asked: Decode, origin: Origin, split: str) -> Prompted:
    """The first tokens of each text as its prompt, and, where it is followed, those after it."""
    steps = _followed(asked)
    if not steps:
        return Prompted([tokens[: asked.prompts.length] for tokens in texts], split)
    shortest = min(map(len, texts))
    if shortest <= steps:
        raise UserError(
            f"a text of {shortest} tokens cannot be followed for {steps}",
            "give a longer text, ask for fewer tokens and warmup together, or leave prompts.follow out",
        )
    # A prompt is shorter where its text is.
    prompts = [tokens[: min(asked.prompts.length, len(tokens) - steps)] for tokens in texts]
    rest = [tokens[len(prompt) :][:steps] for prompt, tokens in zip(prompts, texts, strict=True)]
    for one in rest:
        # Kernels would read weights that are not there.
        check_prompt(origin.architecture, one, steps)
    return Prompted(prompts, split, torch.tensor(rest))


def _traced(asked: Decode, origin: Origin, path: Path) -> Prompted:
    from coresident.engines.moe.traces import files

    found, architecture = files.read(path), origin.architecture
    shape = (found.layers, found.model.experts, found.model.top_k)
    wanted = (origin.layers, architecture.experts, architecture.top_k)
    if shape != wanted:
        raise UserError(
            f"{path} has layers x experts, top k of {_said(shape)}, and the model {_said(wanted)}",
            "give traces of a model of this shape",
        )
    steps = asked.tokens + asked.warmup
    every = [one for one in found.of("held-out").prompts if one.logits is not None]
    held_out = [one for one in every if one.steps >= steps]
    chosen = held_out[asked.prompts.seed : asked.prompts.seed + asked.prompts.batch]
    if len(chosen) < asked.prompts.batch:
        raise UserError(
            f"{path} has {len(held_out)} held-out prompts with router logits and at least {steps} decoded tokens"
            f" (any has {max((one.steps for one in every), default=0)} at most),"
            f" and {asked.prompts.batch} from number {asked.prompts.seed} are asked for",
            f"ask for fewer tokens and warmup together, or prompts; or trace longer (moe trace --max-tokens {steps + 1} or more)",
        )
    length = max(one.prefill for one in chosen) + steps
    logits = torch.zeros(len(chosen), length, origin.layers, architecture.experts)
    for row, one in enumerate(chosen):
        kept = torch.from_numpy(_floats(one.logits)[:length])
        logits[row, : len(kept)] = kept
    return Prompted(
        [[token % architecture.vocabulary for token in one.tokens[: one.prefill].tolist()] for one in chosen],
        "held-out",
        torch.stack(
            [
                torch.from_numpy(one.tokens[one.prefill : one.prefill + steps].astype("int64"))
                for one in chosen
            ]
        )
        % architecture.vocabulary,
        logits,
    )


def _floats(values: Any) -> Any:
    return values.astype("float32")


def _said(shape: tuple[int, int, int]) -> str:
    return f"{shape[0]} x {shape[1]}, {shape[2]}"
