"""All learners' rows have the shape, in what is foretold, that a captured step gives them."""

from __future__ import annotations

import pytest
import torch

from coresident.engines.pool.fit.forward import Rows
from coresident.engines.pool.fit.together import Together, together
from coresident.engines.pool.learning.tokenized import Batch
from coresident.engines.pool.packed.captured import rounded
from coresident.engines.pool.packed.rows import pack
from coresident.engines.pool.parameters import DPO

# Each learner's steps: the lengths of its sequences.
SHORT = [[[20, 21], [23, 22]], [[21, 21], [20, 19]], [[22, 20], [21, 23]]]
EVEN = [[[16, 16], [16, 16]]] * 3


def batch(lengths: list[int]) -> Batch:
    width = max(lengths)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    # Of each sequence the first half is scored.
    places = torch.cat([torch.arange(own // 2) + row * width for row, own in enumerate(lengths)])
    return Batch(ids, mask.long(), mask.long(), places, torch.zeros_like(places), int(mask.sum()))


def told(lengths: list[int]) -> Rows:
    width = max(lengths)
    scored = sum(own // 2 for own in lengths)
    return Rows(len(lengths), width, scored, len(lengths) * width - sum(lengths))


@pytest.mark.parametrize("learners", [SHORT, EVEN], ids=["short", "even"])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_pack_has_the_shape_that_its_captured_step_gives_it(
    learners: list[list[list[int]]], ahead: bool
) -> None:
    # Steps are known before the first one where there are few (`packed.pack`).
    settings = DPO(batch=1, steps=2 if ahead else 10**6, sharing="packed")
    steps = [pack([batch(own[number]) for own in learners]) for number in range(2)]
    most = steps[0].extent.over(steps[1].extent)
    real = [rounded(rows, most if ahead else None) for rows in steps]
    found = together([[told(step) for step in own] for own in learners], len(learners), settings)
    assert found == Together(
        tokens=max(len(rows.ids) for rows in real),
        scored=max(len(rows.labels) for rows in real),
        sequences=real[0].sequences,
        longest=max(rows.longest for rows in real),
        whole=learners is EVEN,
    )


def test_a_learner_is_padded_to_the_most_of_any_step_and_not_to_a_round_number() -> None:
    rows = [[Rows(4, 23, 20, padding=6), Rows(4, 23, 24)]] * 8
    found = together(rows, 64, DPO(batch=2, steps=10, max_length=256, sharing="packed"))
    assert found.tokens == 64 * 92


def test_more_learners_than_were_looked_at_score_in_proportion() -> None:
    rows = [[Rows(4, 20, 10), Rows(4, 20, 14)], [Rows(4, 20, 16), Rows(4, 20, 8)]]
    # 26 in the first step of both, 22 in the second.
    assert [together(rows, count, DPO(steps=2, sharing="packed")).scored for count in (2, 8)] == [26, 104]
