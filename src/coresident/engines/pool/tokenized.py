"""Preference pairs as token ids, cut into padded batches, exactly as TRL's DPOTrainer does.

A loss is only comparable if the tokens are. TRL 1.16: prompt and prompt + completion are tokenised
separately; the completion starts where they diverge (the earlier of both completions' points); plain
completions end in EOS, chats end as their template ends; sequences keep their first `max_length` tokens. TRL
drops pairs that this cut leaves without a completion; here that is an error, so that no learner trains on
less than was asked.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from coresident.engines.pool.parameters import DPO
from coresident.errors import UserError
from coresident.text.preferences import Pair

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class TokenPair:
    """One pair's token ids, not yet truncated; both sequences share `prompt`."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


@dataclass(frozen=True)
class Tokenized:
    """All pairs of one learner, and the id that fills a batch's shorter rows."""

    pairs: tuple[TokenPair, ...]
    padding: int


@dataclass(frozen=True)
class Batch:
    """B pairs as 2B rows, all chosen sequences before all rejected ones, padded on the right to the longest.

    `input_ids`, `attention_mask` and `completion_mask` are int64, shape [2B, L]. `tokens` counts real tokens:
    the sum of the attention mask, never the padded size.
    """

    input_ids: Tensor
    attention_mask: Tensor
    completion_mask: Tensor
    tokens: int

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        masks = self.attention_mask.to(device), self.completion_mask.to(device)
        return Batch(self.input_ids.to(device), *masks, self.tokens)


def tokenize(pairs: Sequence[Pair], tokenizer: Any, settings: DPO) -> Tokenized:
    """Token ids of every pair. Raises UserError where `max_length` would remove a whole completion, naming
    the pair.
    """
    padding = tokenizer.pad_token_id
    if padding is None:
        padding = tokenizer.eos_token_id
    tokenized = []
    for number, pair in enumerate(pairs, start=1):
        ids = _token_pair(pair, tokenizer)
        origin = pair.origin or f"pair {number}"
        if not (ids.chosen and ids.rejected):
            raise UserError(
                f"{origin}: the chat template renders a completion as nothing",
                "use a base whose chat template renders the messages' roles",
            )
        if len(ids.prompt) >= settings.max_length:
            raise UserError(
                f"{origin}: the prompt is {len(ids.prompt)} tokens long, so max_length {settings.max_length}"
                " removes the whole completion",
                f"raise max_length above {len(ids.prompt)} or shorten the prompt",
            )
        tokenized.append(ids)
    return Tokenized(tuple(tokenized), int(padding))


def batches(data: Tokenized, settings: DPO, learner: int) -> Iterator[Batch]:
    """`steps` batches of `batch` pairs, in an order seeded by the run's seed and the learner; reshuffled on
    each pass.
    """
    stream = _order(len(data.pairs), random.Random(f"{settings.seed}:{learner}"))  # noqa: S311
    for _ in range(settings.steps):
        chosen = [data.pairs[index] for index in islice(stream, settings.batch)]
        yield collate(chosen, settings.max_length, data.padding)


def collate(pairs: Sequence[TokenPair], max_length: int, padding: int) -> Batch:
    """One batch: each sequence cut to its first `max_length` tokens, then padded to the longest left."""
    import torch

    completions = [(pair.prompt, pair.chosen) for pair in pairs]
    completions += [(pair.prompt, pair.rejected) for pair in pairs]
    rows = [(prompt + completion)[:max_length] for prompt, completion in completions]
    width = max(map(len, rows))
    tokens = sum(map(len, rows))
    return Batch(
        torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows]),
        torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
        torch.tensor(
            [
                [int(len(prompt) <= place < len(row)) for place in range(width)]
                for row, (prompt, _) in zip(rows, completions, strict=True)
            ]
        ),
        tokens,
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


def _chat(tokenizer: Any, messages: Sequence[Any], **options: bool) -> list[int]:
    if not tokenizer.chat_template:
        raise UserError(
            "the pairs are chat messages and the base's tokenizer has no chat template",
            "give a base whose tokenizer has one, or write the pairs as plain text",
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
