"""One step's tokens of all learners as rows of one matrix: learner after learner, sequence after sequence, without a
padded one among them.

Linear layers see rows and need no sequences. Attention does: for it, and for it alone, rows are laid out in a
rectangle [sequences, longest] and taken back. A rectangle's empty cells repeat the last token of their own sequence,
on the right of all that counts, so that nothing there is another learner's.

What a compiled or captured step needs instead is one shape again and again. `padded` rounds each learner's rows up to
the same number, with rows that belong to no sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from coresident.engines.pool.learning.tokenized import Batch
from coresident.engines.pool.packed.extent import Extent
from coresident.engines.pool.packed.groups import Groups

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The rows of one step: N learners, S sequences, T rows, R of them scored; `longest` is L.

    int64: `ids` [T], `positions` [T] within a sequence; `into` [S * L] the row of each cell of the rectangle and `back` [T] the
    cell of each row; `real` [S * L] bool, which cells hold a row of their own; `kept` [T] bool, which rows belong to a
    sequence (None: all do); `places` [R] the rows that predict
    `labels` [R]; `cells` [R] where in [S * L + spare] each score is put to be summed by sequence; `counts` [N] each learner's
    scored tokens.

    On the host, by learner: `sizes` counts sequences, `tokens` real tokens.
    `whole`: the rectangle has no empty cell and is the rows themselves.
    """

    ids: Tensor
    positions: Tensor
    into: Tensor
    back: Tensor
    real: Tensor
    kept: Tensor | None
    places: Tensor
    labels: Tensor
    cells: Tensor
    counts: Tensor
    groups: Groups
    sequences: int
    longest: int
    spare: int
    whole: bool
    sizes: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What lies on the device, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    @property
    def shape(self) -> tuple[Any, ...]:
        """Rows of equal shape can be put into one another's place."""
        return (
            self.groups, self.sequences, self.longest, self.spare, self.whole, self.sizes,
            tuple(value.shape for value in self.tensors.values()),
        )  # fmt: skip

    @property
    def extent(self) -> Extent:
        """How large they are."""
        return Extent(max(stop - start for start, stop in self.groups.spans), self.longest, len(self.labels))

    def copied(self) -> Rows:
        """The same in memory of its own."""
        copies: dict[str, Any] = {name: value.clone() for name, value in self.tensors.items()}
        return replace(self, **copies)

    def to(self, device: torch.device) -> Rows:
        """The same on another device. A GPU is not waited for."""

        def moved(value: Tensor) -> Tensor:
            if device.type != "cuda" or value.is_cuda:
                return value.to(device)
            return value.pin_memory().to(device, non_blocking=True)

        there: dict[str, Any] = {name: moved(value) for name, value in self.tensors.items()}
        return replace(self, **there)


def pack(batches: Sequence[Batch]) -> Rows:
    """One batch of each learner, in their order, as they were collated for a learner alone."""
    lengths: list[int] = []
    ids, positions, places, labels, cells = [], [], [], [], []
    spans: list[tuple[int, int]] = []
    longest = max(int(batch.attention_mask.sum(1).max()) for batch in batches)
    first = 0
    for batch in batches:
        start, width = first, batch.input_ids.shape[1]
        own = batch.attention_mask.sum(1).tolist()
        # Where a batch's padded rows begin among its real ones, by sequence.
        begins = torch.tensor([first + sum(own[:number]) for number in range(len(own))])
        sequence, column = batch.places // width, batch.places % width
        ids.append(batch.input_ids[batch.attention_mask.bool()])
        positions.append(torch.cat([torch.arange(length) for length in own]))
        places.append(begins[sequence] + column)
        labels.append(batch.labels)
        cells.append((len(lengths) + sequence) * longest + column)
        lengths += own
        first += sum(own)
        spans.append((start, first))
    where = torch.tensor(lengths)
    starts = where.cumsum(0) - where
    column = torch.arange(longest).expand(len(lengths), longest)
    real = column < where[:, None]
    into = starts[:, None] + torch.minimum(column, where[:, None] - 1)
    return Rows(
        torch.cat(ids),
        torch.cat(positions),
        into.flatten(),
        real.flatten().nonzero()[:, 0],
        real.flatten(),
        None,
        torch.cat(places),
        torch.cat(labels),
        torch.cat(cells),
        torch.tensor([len(batch.labels) for batch in batches]),
        Groups(tuple(spans)),
        len(lengths),
        longest,
        0,
        bool(real.all()),
        tuple(len(batch.input_ids) for batch in batches),
        tuple(batch.tokens for batch in batches),
    )


def padded(rows: Rows, to: Extent) -> Rows:
    """The same rows, that large: as many for every learner, a rectangle that wide, that many scored.

    A row too many has the token 0 at position 0, takes its attention from its learner's first cell and gives nothing
    back; a score too many is of such a row, or of one that nothing is asked of, and is summed nowhere.
    """
    each, longest = to.each, to.longest
    spans = rows.groups.spans
    total = len(spans) * each
    if total == len(rows.ids) and rows.groups.even and longest == rows.longest:
        return _more_scored(rows, to.scored)
    moved = torch.cat(
        [torch.arange(stop - start) + number * each for number, (start, stop) in enumerate(spans)]
    )
    columns = rows.cells % rows.longest + rows.cells // rows.longest * longest

    def spread(values: Tensor, fill: Tensor) -> Tensor:
        return fill.index_copy(0, moved, values)

    into = rows.into.view(rows.sequences, -1)
    extra = longest - rows.longest
    into = moved[torch.cat([into, into[:, -1:].expand(-1, extra)], dim=1)]
    real = torch.cat(
        [rows.real.view(rows.sequences, -1), torch.zeros(rows.sequences, extra, dtype=torch.bool)], dim=1
    )
    back = rows.back % rows.longest + rows.back // rows.longest * longest
    homes = torch.cat([back[start : start + 1].expand(each) for start, _ in spans])
    wider = replace(
        rows,
        ids=spread(rows.ids, torch.zeros(total, dtype=torch.int64)),
        positions=spread(rows.positions, torch.zeros(total, dtype=torch.int64)),
        into=into.flatten(),
        back=spread(back, homes),
        real=real.flatten(),
        kept=spread(torch.ones_like(rows.ids), torch.zeros(total, dtype=torch.int64)).bool(),
        places=moved[rows.places],
        cells=columns,
        groups=Groups(tuple((number * each, (number + 1) * each) for number in range(len(spans)))),
        longest=longest,
        whole=False,
    )
    return _more_scored(wider, to.scored)


def _more_scored(rows: Rows, scored: int) -> Rows:
    scored = min(scored, len(rows.ids))
    more = scored - len(rows.places)
    free = torch.ones(len(rows.ids), dtype=torch.bool)
    free[rows.places] = False
    # Room for as many as there may ever be, so that the shape does not tell how many there are.
    return replace(
        rows,
        places=torch.cat([rows.places, free.nonzero()[:more, 0]]),
        labels=torch.cat([rows.labels, torch.zeros(more, dtype=torch.int64)]),
        cells=torch.cat([rows.cells, rows.sequences * rows.longest + torch.arange(more)]),
        spare=scored,
    )
