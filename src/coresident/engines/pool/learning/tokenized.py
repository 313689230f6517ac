"""Preference pairs and samples as token ids, cut into padded batches, exactly as TRL's DPOTrainer and SFTTrainer do.

A loss is only comparable if the tokens are. TRL 1.16: prompt and prompt + completion are tokenised
separately; the completion starts where they diverge (the earlier of both completions' points); plain
completions end in EOS, chats end as their template ends; sequences keep their first `max_length` tokens. TRL
drops pairs that this cut leaves without a completion; here that is an error, so that no learner trains on
less than was asked.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from coresident.engines.pool.parameters import DPO
from coresident.errors import UserError
from coresident.text.preferences import Pair
from coresident.text.samples import Sample

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class TokenPair:
    """One pair's token ids, not yet truncated; both sequences share `prompt`."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]

    @property
    def completions(self) -> tuple[tuple[int, ...], ...]:
        """Its two completions, the chosen one first."""
        return self.chosen, self.rejected


@dataclass(frozen=True)
class Example:
    """One text to imitate: loss is taken on `completion`; without a prompt on all of it but the first token."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]

    @property
    def completions(self) -> tuple[tuple[int, ...], ...]:
        """Its one completion."""
        return (self.completion,)


Item = TokenPair | Example


@dataclass(frozen=True)
class Tokenized:
    """All pairs (or all examples) of one learner, and the id that fills a batch's shorter rows."""

    pairs: tuple[Item, ...]
    padding: int


@dataclass(frozen=True)
class Batch:
    """B pairs as 2B rows, all chosen sequences before all rejected ones (or B examples as B rows), padded on the
    right to the longest.

    `input_ids`, `attention_mask` and `completion_mask` are int64, shape [rows, L]. `labels` [R] are all tokens
    that are scored, row by row, and `places` [R] where each is predicted: positions in the flattened
    [rows x L], one before the token. `tokens` counts real tokens: the sum of the attention mask, never the
    padded size.
    """

    input_ids: Tensor
    attention_mask: Tensor
    completion_mask: Tensor
    places: Tensor
    labels: Tensor
    tokens: int

    def to(self, device: torch.device) -> Batch:
        """What a training step reads, on another device; masks stay. A GPU is not waited for."""

        def moved(values: Tensor) -> Tensor:
            if device.type != "cuda" or values.is_cuda:
                return values.to(device)
            return values.pin_memory().to(device, non_blocking=True)

        return replace(
            self,
            input_ids=moved(self.input_ids),
            places=moved(self.places),
            labels=moved(self.labels),
        )


def tokenize(items: Sequence[Pair | Sample], tokenizer: Any, settings: DPO) -> Tokenized:
    """Token ids of every pair or sample. Raises UserError where `max_length` would remove a whole completion,
    naming the pair.
    """
    padding = tokenizer.pad_token_id
    if padding is None:
        padding = tokenizer.eos_token_id
    tokenized: list[Item] = []
    for number, item in enumerate(items, start=1):
        ids = _token_pair(item, tokenizer) if isinstance(item, Pair) else _example(item, tokenizer)
        _check(ids, item.origin or f"pair {number}", settings.max_length)
        tokenized.append(ids)
    return Tokenized(tuple(tokenized), int(padding))


def _check(ids: Item, origin: str, max_length: int) -> None:
    if not all(ids.completions):
        raise UserError(
            f"{origin}: the chat template renders a completion as nothing",
            "use a base whose chat template renders the messages' roles",
        )
    if len(ids.prompt) >= max_length:
        raise UserError(
            f"{origin}: the prompt is {len(ids.prompt)} tokens long, so max_length {max_length}"
            " removes the whole completion",
            f"raise max_length above {len(ids.prompt)} or shorten the prompt",
        )
    if not ids.prompt and min(map(len, ids.completions)) < 2:
        raise UserError(
            f"{origin}: it is one token, which nothing predicts", "give it more text, or remove the line"
        )


def batches(data: Tokenized, settings: DPO, learner: int, done: int = 0) -> Iterator[Batch]:
    """`planned` batches of `batch` pairs, in an order seeded by the run's seed and the learner; reshuffled on
    each pass. The first `done` of them are left out. Only the last batch of the last of `passes` may be shorter.
    """
    for chosen in drawn(data, settings, learner, done):
        yield collate(chosen, settings.max_length, data.padding)


def planned(data: Tokenized, settings: DPO) -> int:
    """How many steps a learner has: `steps`, or as many as `passes` over its data give, if those are fewer."""
    if not settings.passes:
        return settings.steps
    return min(settings.steps, -(-settings.passes * len(data.pairs) // settings.batch))


def drawn(data: Tokenized, settings: DPO, learner: int, done: int = 0) -> Iterator[list[Item]]:
    """What those batches hold, not yet cut or padded."""
    stream = _order(len(data.pairs), random.Random(f"{settings.seed}:{learner}"))  # noqa: S311
    if settings.passes:
        stream = islice(stream, settings.passes * len(data.pairs))
    stream = islice(stream, done * settings.batch, None)
    for _ in range(done, planned(data, settings)):
        yield [data.pairs[index] for index in islice(stream, settings.batch)]


def collate(pairs: Sequence[Item], max_length: int, padding: int) -> Batch:
    """One batch: each sequence cut to its first `max_length` tokens, then padded to the longest left."""
    import torch

    sides = zip(*(pair.completions for pair in pairs), strict=True)
    sequences = [
        (pair.prompt, completion) for side in sides for pair, completion in zip(pairs, side, strict=True)
    ]
    rows = [(prompt + completion)[:max_length] for prompt, completion in sequences]
    width = max(map(len, rows))
    # A first token is predicted by nothing.
    scored = [range(max(len(prompt), 1), len(row)) for (prompt, _), row in zip(sequences, rows, strict=True)]
    return Batch(
        torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows]),
        torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
        torch.tensor(
            [
                [int(len(prompt) <= place < len(row)) for place in range(width)]
                for row, (prompt, _) in zip(rows, sequences, strict=True)
            ]
        ),
        torch.tensor([number * width + place - 1 for number, span in enumerate(scored) for place in span]),
        torch.tensor([row[place] for row, span in zip(rows, scored, strict=True) for place in span]),
        sum(map(len, rows)),
    )


def _token_pair(pair: Pair, tokenizer: Any) -> TokenPair:
    if isinstance(pair.prompt, str):
        prompt = list(tokenizer(pair.prompt)["input_ids"])
        chosen, rejected = (
            list(tokenizer(pair.prompt + _ended(completion, tokenizer.eos_token))["input_ids"])
            for completion in (pair.chosen, pair.rejected)
        )
    else:
        prompt = _chat(tokenizer, pair.prompt, add_generation_prompt=True)
        chosen, rejected = (_chat(tokenizer, (*pair.prompt, *side)) for side in (pair.chosen, pair.rejected))
    shared = min(_common_prefix(prompt, chosen), _common_prefix(prompt, rejected))
    return TokenPair(tuple(prompt[:shared]), tuple(chosen[shared:]), tuple(rejected[shared:]))


def _example(sample: Sample, tokenizer: Any) -> Example:
    if isinstance(sample.completion, str):
        start = str(sample.prompt or "")
        whole = list(tokenizer(start + _ended(sample.completion, tokenizer.eos_token))["input_ids"])
        prompt = list(tokenizer(start)["input_ids"]) if sample.prompt else []
    else:
        messages = [message for message in sample.prompt or () if not isinstance(message, str)]
        whole = _chat(tokenizer, (*messages, *sample.completion))
        prompt = _chat(tokenizer, messages, add_generation_prompt=True) if sample.prompt else []
    shared = _common_prefix(prompt, whole)
    return Example(tuple(prompt[:shared]), tuple(whole[shared:]))


def _chat(tokenizer: Any, messages: Sequence[Any], **options: bool) -> list[int]:
    if not tokenizer.chat_template:
        raise UserError(
            "the data are chat messages and the base's tokenizer has no chat template",
            "give a base whose tokenizer has one, or write plain text",
        )
    rendered = tokenizer.apply_chat_template(
        [dict(message) for message in messages], tokenize=True, return_dict=True, **options
    )
    return list(rendered["input_ids"])


def _ended(completion: Any, eos: str) -> str:
    text = str(completion)
    return text if text.endswith(eos) else text + eos


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return min(len(left), len(right))


def _order(count: int, source: random.Random) -> Iterator[int]:
    while True:
        order = list(range(count))
        source.shuffle(order)
        yield from order
