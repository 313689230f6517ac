"""Parameters: what is a learner's own, and what no cell's hash changes for."""

from __future__ import annotations

from typing import Any

import pytest

from coresident.engines.pool.parameters import DPO


def test_a_learner_has_its_own_settings_and_the_rest_of_all() -> None:
    own = [{"rank": 4, "learning_rate": 1e-3}, {"pairs": 7, "steps": 3}]
    asked = DPO.model_validate({"learners": 3, "rank": 8, "data": {"pairs": 20}, "own": own})
    one, other, again = (asked.of(number) for number in range(3))
    assert (one.rank, one.learning_rate, one.data.pairs, one.steps) == (4, 1e-3, 20, 10)
    assert (other.rank, other.learning_rate, other.data.pairs, other.steps) == (8, 5e-5, 7, 3)
    # Fewer entries than learners begin from the start.
    assert again == one
    assert one.own == ()
    assert DPO(rank=8).of(5) == DPO(rank=8)


def test_what_came_later_is_not_told_unless_it_is_asked_for() -> None:
    later = {"own", "passes", "dropout", "adapter_products", "step"}
    assert not later & DPO().model_dump().keys()
    told = DPO(sharing="packed", step="eager", passes=1).model_dump()
    assert told.keys() & later == {"step", "passes"}
    assert DPO.model_validate_json(DPO(passes=2).model_dump_json()) == DPO(passes=2)


@pytest.mark.parametrize(
    ("values", "at_once"),
    [({}, 3), ({"schedule": "solo", "sharing": "none"}, 1), ({"sharing": "packed"}, 1)],
    ids=str,
)
def test_how_many_processes_train_at_once(values: dict[str, Any], at_once: int) -> None:
    assert DPO.model_validate({"learners": 3} | values).at_once == at_once
