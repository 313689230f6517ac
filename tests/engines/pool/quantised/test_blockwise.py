"""Indices into a table with a scale for each block."""

from __future__ import annotations

import pytest
import torch

from coresident.engines.pool.quantised import blockwise


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_map_has_256_ascending_values_over_seven_powers_of_ten(signed: bool) -> None:
    table = blockwise.dynamic_map(signed=signed)
    assert table.shape == (256,)
    assert (table.diff() > 0).all()
    assert (table == 0).sum() == 1
    assert table[-1] == 1.0
    smallest = table[table > 0].min()
    assert 1e-7 < smallest < 1e-6
    assert (table < 0).any() == signed


def test_values_are_the_nearest_of_the_table_in_each_block_and_a_last_short_one() -> None:
    numbers = torch.tensor([0.1, -0.4, 0.2, 3.0, -2.0])
    table = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0])
    indices, scales = blockwise.nearest(numbers, table, 3)
    assert scales.tolist() == pytest.approx([0.4, 3.0])
    assert blockwise.values(indices, table, scales, 3).tolist() == pytest.approx([0.0, -0.4, 0.2, 3.0, -1.5])
