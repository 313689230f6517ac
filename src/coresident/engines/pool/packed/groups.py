"""Products in which each learner's rows meet that learner's own matrix, and no other.

Nothing is summed over rows of two learners anywhere, so that a learner whose numbers are no longer finite cannot reach
another's: a zero weight would not help, since 0 x NaN is NaN. Where all learners have the same number of rows, a
product is one batched one; else one a learner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Where the rows of N learners lie: `spans` [start, stop), one after another from row 0 to T."""

    spans: tuple[tuple[int, int], ...]

    @property
    def even(self) -> bool:
        """Whether all have the same number of rows."""
        return len({stop - start for start, stop in self.spans}) == 1

    def split(self, rows: Tensor) -> Tensor:
        """[T, k] as [N, T / N, k], for even groups."""
        return rows.view(len(self.spans), -1, rows.shape[-1])


def times(groups: Groups, rows: Tensor, matrices: Tensor, out: Tensor | None = None) -> Tensor:
    """[T, k] by [N, k, m]: [T, m] (fresh, or `out`), in which learner n's rows are multiplied by matrix n."""
    if out is None:
        out = rows.new_empty(rows.shape[0], matrices.shape[-1])
    if groups.even:
        torch.bmm(groups.split(rows), matrices, out=groups.split(out))
        return out
    for (start, stop), matrix in zip(groups.spans, matrices, strict=True):
        torch.mm(rows[start:stop], matrix, out=out[start:stop])
    return out


def add_times(groups: Groups, out: Tensor, rows: Tensor, matrices: Tensor) -> None:
    """The same, added to `out` [T, m] in place; where `out` has another dtype, rounded to it once."""
    if out.dtype != rows.dtype:
        out.add_(times(groups, rows, matrices))
    elif groups.even:
        groups.split(out).baddbmm_(groups.split(rows), matrices)
    else:
        for (start, stop), matrix in zip(groups.spans, matrices, strict=True):
            out[start:stop].addmm_(rows[start:stop], matrix)


def between(groups: Groups, left: Tensor, right: Tensor, out: Tensor) -> None:
    """[T, k] and [T, m]: left' right over each learner's rows, written into `out` [N, k, m]."""
    if groups.even:
        torch.bmm(groups.split(left).transpose(1, 2), groups.split(right), out=out)
        return
    for (start, stop), place in zip(groups.spans, out, strict=True):
        torch.mm(left[start:stop].t(), right[start:stop], out=place)
