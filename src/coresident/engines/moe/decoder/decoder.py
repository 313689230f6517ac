"""Decoding in plain operations: a prefill of all prompts at once, then a token for each at every step.

Prompts lie one after another as rows, without padding: what a row's experts compute does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from coresident.engines.moe.decoder import blocks
from coresident.engines.moe.models.architecture import Architecture
from coresident.engines.moe.models.dense import Dense
from coresident.engines.moe.residency.experts import Experts
from coresident.errors import UserError

# What a router did: of which mixture layer, raw logits [N, E] in float32 and the experts [N, K] of int64, for N rows.
Watch = Callable[[int, Tensor, Tensor], None]
# Another router's scores in place of the model's own: of mixture layer, texts [N] and positions in them [N], float32 [N, E].
Replay = Callable[[int, Tensor, Tensor], Tensor]


@dataclass
class State:
    """What decoding keeps: keys and values [layers, B, kv_heads, T, D], and how many tokens each row has, [B]."""

    keys: Tensor
    values: Tensor
    lengths: Tensor


@dataclass
class Decoder:
    """A model ready to decode up to `context` tokens a row. `watch` sees every router decision, `replay` replaces it."""

    architecture: Architecture
    dense: Dense
    experts: Experts
    context: int
    watch: Watch | None = None
    replay: Replay | None = None
    state: State | None = field(init=False, default=None)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.dense.embedding.device

    @property
    def filled_by(self) -> str:
        """Who brought in what the last step missed: `host`, or kernels on the `device`."""
        return "host"

    def warm(self, batch: int) -> None:
        """Do what the first step of `batch` rows would otherwise do once; here there is nothing."""

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], every: bool = False) -> Tensor:
        """Read the prompts; scores after each one's last token [B, V], or, with `every`, after each token [N, V].

        Raises UserError for an empty prompt and for one beyond the context.
        """
        for prompt in prompts:
            check_prompt(self.architecture, prompt, self.context)
        found = self.architecture
        lengths = [len(prompt) for prompt in prompts]
        self.state = self._fresh(lengths)
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(self.device)
        texts = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(self.device)
        x = F.embedding(tokens, self.dense.embedding)
        mixture = 0
        for number, layer in enumerate(self.dense.layers):
            normed = blocks.rms_norm(x, layer.attention_norm, found.eps)
            query, key, value = blocks.project(found, self.dense, layer, normed, positions)
            mixed = self._attend_prompts(number, query, key, value, lengths)
            x = x + F.linear(mixed, layer.out)
            x, mixture = self._feed_forward(number, mixture, x, (texts, positions), prefill=True)
        if not every:
            x = x[torch.tensor(lengths, device=self.device).cumsum(0) - 1]
        return F.linear(blocks.rms_norm(x, self.dense.norm, found.eps), self.dense.output)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """One more token for each row, [B] of int64, to scores of the next [B, V]. Raises UserError beyond the context."""
        state = self._running()
        found, positions = self.architecture, state.lengths.clone()
        longest = int(positions.max()) + 1
        if longest > self.context:
            raise UserError(
                f"a text of {longest} tokens is beyond the context of {self.context}",
                "ask for fewer tokens, or give a shorter prompt",
            )
        mask = torch.arange(longest, device=self.device) <= positions[:, None]
        rows = torch.arange(len(tokens), device=self.device)
        x = F.embedding(tokens, self.dense.embedding)
        mixture = 0
        for number, layer in enumerate(self.dense.layers):
            normed = blocks.rms_norm(x, layer.attention_norm, found.eps)
            query, key, value = blocks.project(found, self.dense, layer, normed, positions)
            state.keys[number, rows, :, positions] = key
            state.values[number, rows, :, positions] = value
            keys, values = state.keys[number, :, :, :longest], state.values[number, :, :, :longest]
            mixed = blocks.attend(query[:, :, None], keys, values, mask[:, None, None])
            x = x + F.linear(mixed.flatten(1), layer.out)
            x, mixture = self._feed_forward(number, mixture, x, (rows, positions), prefill=False)
        state.lengths += 1
        return F.linear(blocks.rms_norm(x, self.dense.norm, found.eps), self.dense.output)

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only; the others' texts are over."""
        state, index = self._running(), torch.tensor(rows, device=self.device)
        self.state = State(state.keys[:, index], state.values[:, index], state.lengths[index])

    def settle(self) -> None:
        """Bring the cache's books on the host up to date, before they are read; here they always are."""

    def _running(self) -> State:
        if self.state is None:
            raise UserError("no prompt was read", "call prefill first")
        return self.state

    def _fresh(self, lengths: Sequence[int]) -> State:
        found = self.architecture
        size = (found.layers, len(lengths), found.kv_heads, self.context, found.head_width)
        kind = self.dense.embedding.dtype
        keys, values = (torch.zeros(size, dtype=kind, device=self.device) for _ in range(2))
        return State(keys, values, torch.tensor(lengths, device=self.device))

    def _attend_prompts(
        self, number: int, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]
    ) -> Tensor:
        state, mixed, first = self._running(), [], 0
        for row, length in enumerate(lengths):
            rows = slice(first, first + length)
            one, two, three = (each[rows].transpose(0, 1) for each in (query, key, value))
            state.keys[number, row, :, :length], state.values[number, row, :, :length] = two, three
            mixed.append(blocks.attend(one[None], two[None], three[None], None)[0].transpose(0, 1).flatten(1))
            first += length
        return torch.cat(mixed)

    def _feed_forward(
        self, number: int, mixture: int, x: Tensor, where: tuple[Tensor, Tensor], prefill: bool
    ) -> tuple[Tensor, int]:
        layer = self.dense.layers[number]
        normed = blocks.rms_norm(x, layer.feedforward_norm, self.architecture.eps)
        if layer.router is None:
            return x + blocks.feed_forward(layer, normed), mixture
        replay = self.replay
        logits = replay(mixture, *where) if replay else blocks.router_logits(layer, normed)
        chosen, weights = blocks.route(self.architecture, logits)
        if self.watch is not None:
            self.watch(mixture, logits, chosen)
        return x + self.experts.run(mixture, normed, chosen, weights, prefill), mixture + 1


def check_prompt(found: Architecture, prompt: Sequence[int], context: int) -> None:
    """Raises UserError for what cannot be read."""
    if not prompt:
        raise UserError("a prompt is empty", "give at least one token")
    if len(prompt) > context:
        raise UserError(
            f"a prompt of {len(prompt)} tokens is beyond the context of {context}",
            "give a shorter prompt",
        )
    strange = next((token for token in prompt if not 0 <= token < found.vocabulary), None)
    if strange is not None:
        raise UserError(
            f"a prompt holds token {strange}, and the model knows {found.vocabulary}",
            "use the tokenizer that belongs to the model",
        )
