"""`coresident moe trace`: from a model and prompts to a checked set of traces."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from numpy.typing import NDArray
from pydantic import Field

from coresident.engines.moe.models.checkpoint import Checkpoint, open_checkpoint
from coresident.engines.moe.place import require
from coresident.engines.moe.traces.files import read, write
from coresident.engines.moe.traces.manifest import Router, Sampling
from coresident.engines.moe.traces.packed import rounded
from coresident.engines.moe.traces.prompts import Prompt, divided
from coresident.engines.moe.traces.traces import Trace, Traces, kind
from coresident.errors import UserError
from coresident.workload import Parameters

if TYPE_CHECKING:
    from coresident.engines.moe.traces.routed import Generate, Routed


class Tracing(Parameters):
    """How prompts are traced.

    Each is cut to `prompt_tokens`, then `max_tokens` are drawn at `temperature` (0: the likeliest). `held_out` is the share
    of each family's prompts that predictors are judged on. `logits` are kept rounded, such that they still choose what was
    chosen (`int8`: a byte each, and a span a row). `depths` are how many layers ahead a router is shown the state of (for the
    predictor `next-router`), keeping its first `ahead` experts. `batch` prompts of one length go through together. `by` is
    who computes: transformers, or our own decoder with every expert resident, which sees no states ahead.
    """

    max_tokens: Annotated[int, Field(ge=2)] = 256
    prompt_tokens: Annotated[int, Field(ge=1)] = 64
    temperature: Annotated[float, Field(ge=0)] = 0.8
    seed: int = 0
    held_out: Annotated[float, Field(ge=0, le=1)] = 0.5
    logits: Literal["float16", "float32", "int8", "none"] = "float16"
    depths: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)] = (1, 2, 3)
    ahead: Annotated[int, Field(ge=1)] = 16
    batch: Annotated[int, Field(ge=1)] = 16
    by: Literal["transformers", "coresident"] = "transformers"


def trace(
    path: Path,
    prompts: Sequence[Prompt],
    settings: Tracing,
    out: Path,
    device: str,
    say: Callable[[str], None],
) -> Traces:
    """Trace `prompts` through the Hugging Face directory `path` and write the set into the new directory `out`.

    `device` is `cpu` or a card's UUID. Raises UserError for a model, prompt or place that will not do, before anything is
    computed where that can be known.
    """
    if not prompts:
        raise UserError("there is no prompt to trace", "give a JSONL file with prompts, or built-in")
    require(out)
    checkpoint = open_checkpoint(path)
    prompts = divided(prompts, settings.held_out)
    tokens = _tokens(path, prompts, settings.prompt_tokens)
    _fits(checkpoint, tokens, prompts, settings.max_tokens)
    found = _traced(checkpoint, prompts, tokens, settings, device, say)
    write(found, out, pack=settings.logits == "int8")
    return read(out)


def router(checkpoint: Checkpoint) -> Router:
    """What traces say of the model."""
    shape = checkpoint.architecture
    return Router(
        identity=checkpoint.identity,
        architecture=shape.kind,
        layers=shape.mixtures,
        experts=shape.experts,
        top_k=shape.top_k,
        normalise=shape.normalise,
    )


def _tokens(path: Path, prompts: Iterable[Prompt], limit: int) -> list[list[int]]:
    from coresident.text import tokenizer

    words = tokenizer.load(path)
    found = []
    for one in prompts:
        ids = list(words(one.text)["input_ids"])[:limit]
        if not ids:
            raise UserError(f"the prompt {one.name} has no token", "give it text, or remove it")
        found.append(ids)
    return found


def _fits(
    checkpoint: Checkpoint, tokens: Sequence[Sequence[int]], prompts: Sequence[Prompt], more: int
) -> None:
    context, vocabulary = checkpoint.architecture.context, checkpoint.architecture.vocabulary
    for ids, one in zip(tokens, prompts, strict=True):
        if max(ids) >= vocabulary:
            raise UserError(
                f"the tokenizer gives token {max(ids)}, and the model knows {vocabulary}",
                "give the tokenizer that belongs to the model",
            )
        if len(ids) + more > context:
            raise UserError(
                f"prompt {one.name}: {len(ids)} tokens and {more} more are beyond the context of {context}",
                f"ask for at most {max(1, context - len(ids))} by max_tokens, or cut prompts by prompt_tokens",
            )


def _traced(
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt],
    tokens: Sequence[Sequence[int]],
    settings: Tracing,
    device: str,
    say: Callable[[str], None],
) -> Traces:
    from coresident.engines.moe import assemble

    shape = checkpoint.architecture
    sampling = Sampling(
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        seed=settings.seed,
        by=settings.by,
    )
    depths = tuple(depth for depth in settings.depths if depth < len(shape.mixtures))
    where = assemble.device_of(device)
    found: dict[int, Trace] = {}
    with contextlib.ExitStack() as open_:
        generate: Generate
        if settings.by == "transformers":
            from coresident.engines.moe.traces import hooked

            ahead = hooked.Ahead(depths, min(settings.ahead, shape.experts))
            generate = hooked.generator(checkpoint, where, ahead)
        else:
            from coresident.engines.moe.traces import decoded

            depths, longest = (), max(map(len, tokens))
            generate = open_.enter_context(
                decoded.generating(checkpoint, where, sampling, longest, settings.batch)
            )
        for places in _batches(tokens, settings.batch):
            own = [tokens[place] for place in places]
            routed = generate(own, [_seed(settings.seed, ids) for ids in own], sampling)
            for place, one in zip(places, routed, strict=True):
                found[place] = _kept(prompts[place], len(tokens[place]), one, settings, shape.experts)
            say(f"{len(found)} of {len(prompts)} prompts")
    return Traces(router(checkpoint), sampling, tuple(found[place] for place in sorted(found)), depths)


def _batches(tokens: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Places of prompts of one length, at most `size` together: nothing is padded."""
    lengths: dict[int, list[int]] = {}
    for place, ids in enumerate(tokens):
        lengths.setdefault(len(ids), []).append(place)
    return [same[start : start + size] for same in lengths.values() for start in range(0, len(same), size)]


def _seed(seed: int, tokens: Sequence[int]) -> int:
    digest = hashlib.sha256(f"{seed}:{list(tokens)}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _kept(prompt: Prompt, prefill: int, one: Routed, settings: Tracing, experts: int) -> Trace:
    assert prompt.split is not None
    return Trace(
        prompt.name,
        prompt.family,
        prompt.split,
        prefill,
        one.tokens,
        one.experts.astype(kind(experts)),
        _logits(one, settings.logits),
        one.ahead.astype(kind(experts)) if one.ahead.shape[1] else None,
    )


def _logits(one: Routed, kept: str) -> NDArray[Any] | None:
    if kept == "none":
        return None
    return one.logits if kept == "int8" else rounded(one.logits, one.experts, kept)
