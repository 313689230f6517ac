"""Rows: every real token once, attention within a sequence, and shapes that repeat where they must."""

from __future__ import annotations

import pytest
import torch

from coresident.engines.pool.learning.tokenized import Batch, TokenPair, collate
from coresident.engines.pool.packed.attention import attend
from coresident.engines.pool.packed.captured import rounded
from coresident.engines.pool.packed.extent import Extent
from coresident.engines.pool.packed.groups import Groups, add_times, between, times
from coresident.engines.pool.packed.rows import pack, padded

LONG = TokenPair((1, 2, 3), (4, 5, 6, 7), (8,))
SHORT = TokenPair((9,), (1, 2), (3, 4))


def batches() -> list[Batch]:
    return [collate([LONG, SHORT], 16, 0), collate([SHORT], 16, 0)]


def test_rows_are_the_real_tokens_one_learner_after_another() -> None:
    rows = pack(batches())
    assert rows.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 1, 2, 3, 8, 9, 3, 4, 9, 1, 2, 9, 3, 4]
    assert rows.groups == Groups(((0, 17), (17, 23)))
    assert rows.positions[:8].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    assert rows.tokens == (17, 6)
    assert rows.sizes == (4, 2)
    # Each scored token with the row before it, and put where its sequence is summed.
    assert (
        rows.ids[rows.places + 1].tolist() == rows.labels.tolist() == [4, 5, 6, 7, 1, 2, 8, 3, 4, 1, 2, 3, 4]
    )
    assert (rows.cells // rows.longest).tolist() == [0, 0, 0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 5]
    assert rows.counts.tolist() == [9, 4]


@pytest.mark.parametrize("shape", [None, (32, 8, 16)], ids=["as it is", "rounded up"])
def test_attention_is_each_sequences_own(shape: tuple[int, int, int] | None) -> None:
    rows = pack(batches())
    source = torch.Generator().manual_seed(0)
    real = torch.randn(3, 23, 2, 4, generator=source, dtype=torch.float64)
    places = torch.arange(23)
    if shape is not None:
        rows = padded(rows, Extent(*shape))
        places = torch.cat([torch.arange(17), 32 + torch.arange(6)])
    spread = torch.full((3, len(rows.ids), 2, 4), 7.0, dtype=torch.float64)
    spread[:, places] = real
    spread.requires_grad_()
    found = attend(rows, *spread, None)[places]
    wanted = torch.randn(found.shape, generator=source, dtype=torch.float64)
    (found * wanted).sum().backward()
    assert spread.grad is not None
    first = 0
    for length in (7, 3, 4, 3, 3, 3):
        own = slice(first, first + length)
        alone = real[:, own].clone().requires_grad_()
        states = [state.transpose(0, 1)[None] for state in alone]
        true = torch.nn.functional.scaled_dot_product_attention(*states, is_causal=True)[0].transpose(0, 1)
        (true * wanted[own]).sum().backward()
        torch.testing.assert_close(found[own], true)
        torch.testing.assert_close(spread.grad[:, places[own]], alone.grad)
        first += length
    rest = torch.ones(len(rows.ids), dtype=torch.bool)
    rest[places] = False
    assert not spread.grad[:, rest].any()


@pytest.mark.parametrize("rounded_up", [False, True])
def test_a_sequence_that_is_not_finite_reaches_no_other(rounded_up: bool) -> None:
    rows = padded(pack(batches()), Extent(32, 8, 16)) if rounded_up else pack(batches())
    states = torch.randn(3, len(rows.ids), 2, 4).requires_grad_()
    with torch.no_grad():
        states[:, : rows.groups.spans[0][1]] = torch.nan
    found = attend(rows, *states, None)
    found[rows.groups.spans[1][0] :].sum().backward()
    assert states.grad is not None
    for part in (found, *states.grad):
        assert torch.isfinite(part[rows.groups.spans[1][0] :]).all()


def test_rounded_rows_keep_their_scores_apart_from_the_rest() -> None:
    rows = padded(pack(batches()), Extent(32, 8, 16))
    assert rows.shape == padded(pack(batches()[:1] + batches()[1:]), Extent(32, 8, 16)).shape
    assert len(rows.ids) == 64
    assert rows.places.unique().numel() == 16
    assert rows.spare == 16
    assert rows.ids[rows.places[:13] + 1].tolist() == rows.labels[:13].tolist()
    assert (rows.cells[13:] >= rows.sequences * rows.longest).all()


def test_rows_without_gaps_are_not_moved() -> None:
    even = [collate([TokenPair((1, 2), (3, 4), (5, 6))], 16, 0) for _ in range(2)]
    rows = pack(even)
    assert rows.whole
    more = padded(rows, Extent(8, 4, 10))
    assert more.whole
    assert len(more.labels) == len(rows.labels) + 2
    assert torch.equal(more.ids, rows.ids)


@pytest.mark.parametrize("spans", [((0, 3), (3, 6)), ((0, 1), (1, 6))], ids=["even", "uneven"])
def test_products_meet_each_learners_own_matrix(spans: tuple[tuple[int, int], ...]) -> None:
    groups = Groups(spans)
    rows, matrices = torch.randn(6, 4), torch.randn(2, 4, 3)
    parts = [rows[start:stop] @ matrix for (start, stop), matrix in zip(spans, matrices, strict=True)]
    expected = torch.cat(parts)
    torch.testing.assert_close(times(groups, rows, matrices), expected)
    out = torch.ones(6, 3)
    add_times(groups, out, rows, matrices)
    torch.testing.assert_close(out, expected + 1)
    found = torch.empty(2, 4, 3)
    between(groups, rows, out, found)
    for number, (start, stop) in enumerate(spans):
        torch.testing.assert_close(found[number], rows[start:stop].t() @ out[start:stop])


def test_few_shapes_serve_many_steps() -> None:
    steps = [pack([collate([TokenPair((1,) * 9, (2,) * count, (3,))], 64, 0)] * 2) for count in range(10, 31)]
    most = steps[-1].extent
    # As large as the largest where that is at most a quarter more; else rounded up.
    shapes = {rounded(rows, most).shape for rows in steps}
    assert len({rows.shape for rows in steps}) == 21
    assert len(shapes) <= 8
    assert len({rounded(rows).shape for rows in steps}) < 21
    assert max(len(rounded(rows, most).ids) / len(rows.ids) for rows in steps) <= 1.3
    assert rounded(steps[-1], most).extent == most
