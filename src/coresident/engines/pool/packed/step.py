"""One training step of all learners of a pack, from rows to adapters, without a wait: the plain one, operation by
operation. Compiled and captured steps are held to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from coresident.engines.pool.learning.learner import FIGURES
from coresident.engines.pool.packed.arena import Arena
from coresident.engines.pool.packed.extent import Extent
from coresident.engines.pool.packed.groups import Groups
from coresident.engines.pool.packed.objective import Objective, by_sequence, imitations, preferences
from coresident.engines.pool.packed.optimiser import advance_in_parts, norms
from coresident.engines.pool.packed.policy import Current, Policy
from coresident.engines.pool.packed.rows import Rows
from coresident.engines.pool.parameters import DPO

if TYPE_CHECKING:
    from torch import Tensor


class Step:
    """For the learners with these `settings`, whose adapters are the rows of `arena`. `alive` [N] bool says which of them
    still learn: what another's numbers are is nobody's concern, and nothing of them is applied.
    """

    def __init__(self, policy: Policy, arena: Arena, settings: Sequence[DPO], alive: Tensor) -> None:
        self.policy, self.arena, self.alive = policy, arena, alive
        self.loss = settings[0].loss
        # The order in which a learner alone looks at them (`learning.learner`).
        self.names = ("loss", "gradient_norm", *FIGURES[self.loss])
        exact = arena.masters.dtype
        device = arena.masters.device
        self.betas = torch.tensor([own.beta for own in settings], dtype=exact, device=device)
        factors = [own.alpha / own.rank for own in settings]
        self._factors = None if set(factors) == {1.0} else factors
        self._groups: Groups | None = None
        self._row_scale: Tensor | None = None

    def shaped(self, rows: Rows, most: Extent | None) -> Rows:  # noqa: ARG002 - for others
        """The rows (on the host) in a shape that this step takes: as they are. `most` is the largest of all steps'."""
        return rows

    def at(self, rows: Rows) -> None:
        """Let the adapted layers work on these rows."""
        if rows.groups != self._groups:
            self._groups, self._row_scale = rows.groups, None
            if self._factors is not None:
                counts = torch.tensor([stop - start for start, stop in rows.groups.spans])
                each = torch.tensor(self._factors, dtype=torch.float64).repeat_interleave(counts)
                self._row_scale = each[:, None].to(self.arena.work)
        self.policy.current = Current(self.arena, rows.groups, self._row_scale)

    @torch.no_grad()
    def reference(self, rows: Rows, adapters: bool = False) -> Tensor:
        """Log-probabilities [S] of the rows' sequences under the bare base, or with adapters as they are; no graph.

        Under the bare base, the rows may be of any learners.
        """
        if adapters:
            self.at(rows)
        else:
            self.policy.current = None
        return by_sequence(rows, self.policy.score(rows))

    def __call__(self, rows: Rows, reference: Tensor | None, rates: Tensor) -> Tensor:
        """Train on the rows. `reference` [S] was worked out before (None: the base's, now).

        Returns, for each of `names`, what each learner's is: [names + 1, N], float64; the last row is 1 where all is
        finite and was applied. Nothing is waited for.
        """
        objective = self._objective(rows, reference)
        objective.losses.backward(torch.ones_like(objective.losses))  # type: ignore[no-untyped-call]
        return self._applied(objective, rates)

    def _objective(self, rows: Rows, reference: Tensor | None) -> Objective:
        if self.loss == "sft":
            self.at(rows)
            return imitations(rows, by_sequence(rows, self.policy.score(rows)))
        if reference is None:
            # First: its activations are gone before the policy's are kept for the backward pass.
            reference = self.reference(rows)
        self.at(rows)
        return preferences(rows, by_sequence(rows, self.policy.score(rows)), reference, self.betas)

    @torch.no_grad()
    def _applied(self, objective: Objective, rates: Tensor) -> Tensor:
        lengths = norms(self.arena.grads, self.arena.masters.dtype)
        known = {"loss": objective.losses.detach(), "gradient_norm": lengths, **objective.figures}
        figures = torch.stack([known[name].double() for name in self.names])
        sound = self.alive & torch.isfinite(figures).all(0)
        self._advance(rates, lengths, sound)
        self.alive.copy_(sound)
        return torch.cat([figures, sound.double()[None]])

    def _advance(self, rates: Tensor, lengths: Tensor, sound: Tensor) -> None:
        advance_in_parts(self.arena, rates, lengths, sound)
