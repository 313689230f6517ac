"""A step whose decoder has its backward pass written out (`decoder`), for bases of Llama's kind: what `compiled` and
`captured` steps are. With nothing compiled it runs on a CPU too, where it is held to the plain step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from coresident.engines.pool.learning.logprobs import chunk_rows
from coresident.engines.pool.packed.arena import Arena
from coresident.engines.pool.packed.decoder import Decoder
from coresident.engines.pool.packed.objective import by_sequence, imitations, preferences
from coresident.engines.pool.packed.optimiser import advance
from coresident.engines.pool.packed.pointwise import Pointwise
from coresident.engines.pool.packed.policy import Policy
from coresident.engines.pool.packed.rows import Rows
from coresident.engines.pool.packed.step import Step
from coresident.engines.pool.parameters import DPO

if TYPE_CHECKING:
    from torch import Tensor

# Of logits in the model's dtype: large products, and still little beside a layer's activations.
BUDGET = 512 * 2**20


class Written(Step):
    """`compile`: everything between products is compiled."""

    def __init__(
        self, policy: Policy, arena: Arena, settings: Sequence[DPO], alive: Tensor, compile: bool = False
    ) -> None:
        super().__init__(policy, arena, settings, alive)
        self.pointwise = Pointwise().compiled() if compile else Pointwise()
        self._compiled = compile
        self._advance_one: Any = torch.compile(advance, fullgraph=True) if compile else None
        self.decoder = Decoder(policy, self.pointwise, settings[0].checkpointing)

    @torch.no_grad()
    def reference(self, rows: Rows, adapters: bool = False) -> Tensor:
        """As the plain step's."""
        if adapters:
            self.at(rows)
        else:
            self.policy.current = None
        hidden, _ = self.decoder.forward(rows, keep=False)
        return by_sequence(rows, self._scores(rows, hidden))

    def __call__(self, rows: Rows, reference: Tensor | None, rates: Tensor) -> Tensor:
        """As the plain step's."""
        if self.loss == "dpo" and reference is None:
            reference = self.reference(rows)
        self.at(rows)
        hidden, kept = self.decoder.forward(rows, keep=True)
        scores, slopes = self._scored(rows, hidden)
        del hidden
        scores.requires_grad_()
        with torch.enable_grad():
            if reference is None:
                objective = imitations(rows, by_sequence(rows, scores))
            else:
                objective = preferences(rows, by_sequence(rows, scores), reference, self.betas)
            objective.losses.backward(torch.ones_like(objective.losses))  # type: ignore[no-untyped-call]
        assert scores.grad is not None
        # Places are distinct: copied, not added.
        gradient = slopes.new_zeros(len(rows.ids), slopes.shape[1])
        gradient.index_copy_(0, rows.places, (slopes * scores.grad[:, None]).to(slopes.dtype))
        del slopes
        self.decoder.backward(rows, kept, gradient)
        return self._applied(objective, rates)

    def _scored(self, rows: Rows, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As `learning.logprobs.fused`: log-probabilities [R], and their gradients by the hidden states [R, d]."""
        weight, bias = self.policy.scorer.weight, self.policy.scorer.bias
        assert weight is not None
        chosen = hidden.index_select(0, rows.places)
        scores, slopes = self.betas.new_empty(len(chosen)), torch.empty_like(chosen)
        for part in self._chunks(len(chosen), weight):
            score, slope = self.pointwise.scored(F.linear(chosen[part], weight, bias), rows.labels[part])
            scores[part] = score
            torch.mm(slope, weight, out=slopes[part])
            del slope
        return scores, slopes

    def _scores(self, rows: Rows, hidden: Tensor) -> Tensor:
        weight, bias = self.policy.scorer.weight, self.policy.scorer.bias
        assert weight is not None
        chosen = hidden.index_select(0, rows.places)
        scores = self.betas.new_empty(len(chosen))
        for part in self._chunks(len(chosen), weight):
            scores[part] = self.pointwise.score_alone(F.linear(chosen[part], weight, bias), rows.labels[part])
        return scores

    def _chunks(self, rows: int, weight: Tensor) -> list[slice]:
        size = chunk_rows(rows, weight.shape[0], weight.element_size(), BUDGET)
        return [slice(start, start + size) for start in range(0, rows, size)]

    def _advance(self, rates: Tensor, lengths: Tensor, sound: Tensor) -> None:
        if not self._compiled:
            super()._advance(rates, lengths, sound)
            return
        arena = self.arena
        work = None if arena.work is arena.masters else arena.work
        # A learner at a time: what a compiler writes out on the way is of one, and its code does not depend on how many.
        for row in range(len(arena.ranks)):
            one = slice(row, row + 1)
            self._advance_one(
                arena.masters[one],
                [moment[one] for moment in arena.moments],
                arena.grads[one],
                rates[one],
                lengths[one],
                sound[one],
                None if work is None else work[one],
                arena.tables,
            )
