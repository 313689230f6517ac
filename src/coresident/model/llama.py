"""A Llama, dense or of experts: all but the feed-forward block is shared.

Written so that `torch.compile(model.loss, fullgraph=True)` holds: no value decides what runs next, and nothing waits for
the host. Autocast belongs inside of what is compiled: entered outside, the backward pass is traced under it too, and
what is float32 on purpose loses it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coresident.errors import UserError
from coresident.model import cross_entropy
from coresident.model.attention import Attention, AttentionKernel
from coresident.model.balance import Routing, auxiliary
from coresident.model.feedforward import FeedForward
from coresident.model.mixture import MixtureBlock
from coresident.model.norm import RMSNorm
from coresident.model.rope import tables
from coresident.model.shape import ModelShape
from coresident.model.weight import unset


class Hidden(NamedTuple):
    """`hidden` [B, T, d], normalised, ready for the output layer; `router`: what the routers did (None: no experts)."""

    hidden: Tensor
    router: Routing | None


class Loss(NamedTuple):
    """Parts of a microbatch's loss, all scalars on its device.

    `cross_entropy`: the sum over valid targets, in float32. `targets`: how many are valid, int64. `auxiliary`: balance
    and z losses of the experts, weighted, as a mean over valid tokens (0 without experts). The mean loss of several
    microbatches is sum(cross_entropy) / sum(targets) + sum(auxiliary * targets) / sum(targets).
    """

    cross_entropy: Tensor
    targets: Tensor
    auxiliary: Tensor


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + feedforward(norm(x))."""

    def __init__(self, shape: ModelShape, kernel: AttentionKernel) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.width, shape.eps)
        self.attention = Attention(shape, kernel)
        self.feedforward_norm = RMSNorm(shape.width, shape.eps)
        self.feedforward: FeedForward | MixtureBlock
        if shape.mixture:
            self.feedforward = MixtureBlock(shape.width, shape.mixture)
        else:
            self.feedforward = FeedForward(shape.width, shape.feedforward or 0)

    def forward(
        self, x: Tensor, cosines: Tensor, sines: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        normed = self.feedforward_norm(x)
        if isinstance(self.feedforward, MixtureBlock):
            mixed, logits, chosen = self.feedforward(normed)
            return x + mixed, (logits, chosen)
        return x + self.feedforward(normed), None


class Llama(nn.Module):
    """The model. Weights are NaN until `initialise` or `load` sets them.

    `attention` and `loss_chunk` (rows of logits made at a time; 0: all at once) say how it is computed, not what.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, shape: ModelShape, attention: AttentionKernel = "auto", loss_chunk: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.loss_chunk = loss_chunk
        self.embedding = unset(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape, attention) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width, shape.eps)
        self.output = None if shape.tied else unset(shape.vocabulary, shape.width)
        cosines, sines = tables(shape.context, shape.head_width, shape.rope_theta)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    @property
    def table(self) -> Tensor:
        """The output layer [V, d]: the embedding itself where tied."""
        return self.embedding if self.output is None else self.output

    def forward(self, tokens: Tensor) -> Hidden:
        """tokens [B, T] of int64 to the last hidden states; raises UserError for T above the context."""
        length = tokens.shape[1]
        if length > self.shape.context:
            raise UserError(
                f"{length} tokens do not fit a context of {self.shape.context}", "give shorter sequences"
            )
        cosines, sines = self.cosines[:length], self.sines[:length]
        # Not self.embedding[tokens], whose backward costs some 5 % of a step more.
        x = F.embedding(tokens, self.embedding)
        routed = []
        for layer in self.layers:
            x, routing = layer(x, cosines, sines)
            if routing is not None:
                routed.append(routing)
        router = Routing(*(tuple(part) for part in zip(*routed, strict=True))) if routed else None
        return Hidden(self.norm(x), router)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: [..., d] to [..., V]."""
        return F.linear(hidden, self.table)

    def loss(self, tokens: Tensor, targets: Tensor) -> Loss:
        """tokens [B, T] and the token after each [B, T], -100 where none counts, both int64."""
        hidden, router = self(tokens)
        rows, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        if self.loss_chunk:
            total = cross_entropy.chunked(rows, self.table, wanted, self.loss_chunk)
        else:
            total = cross_entropy.plain(rows, self.table, wanted)
        counted = wanted != cross_entropy.IGNORED
        mixture = self.shape.mixture
        if mixture is None or router is None:
            beside = torch.zeros_like(total)
        else:
            beside = auxiliary(router, counted, mixture.balance, mixture.z)
        return Loss(total, counted.sum(), beside)
