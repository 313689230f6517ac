"""The driver's side of a card: who ran under MPS is read back, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from coresident.engines.pool.card.card import Memory
from coresident.engines.pool.job import HOLDS, Job
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.processes.card_side import card_side, decide_mps, settled, sweep

GIB = 1 << 30


def job(**values: object) -> Job:
    parameters = DPO.model_validate(values)
    hold = HOLDS[parameters.sharing]
    return Job(parameters=parameters, hold=hold, base="", events="", work="", cpus=[], device="GPU-1")


@pytest.mark.parametrize(
    ("asked", "flags", "clients", "passed"),
    [
        ("on", {"a": True, "b": True}, 2, True),
        ("on", {"a": True, "b": False}, 2, False),
        ("on", {"a": True, "b": True}, 1, False),
        ("on", {"a": None, "b": None}, 2, True),
        ("on", {"a": None, "b": None}, None, None),
        ("on", {"a": True, "b": True}, None, True),
        ("off", {"a": False, "b": False}, None, True),
        ("off", {"a": False, "b": True}, None, False),
        ("off", {"a": None, "b": False}, None, None),
        ("off", {}, None, None),
    ],
)
def test_mps_is_what_every_process_ran_with(
    asked: str, flags: dict[str, bool | None], clients: int | None, passed: bool | None
) -> None:
    assert decide_mps(asked, flags, clients, 2).passed is passed


@pytest.mark.parametrize(
    ("sharing", "schedule", "bases"),
    [("none", "together", 4), ("fork", "together", 1), ("fork-copy", "together", 5), ("none", "solo", 1)],
)
def test_what_cannot_fit_is_refused_before_a_process_starts(sharing: str, schedule: str, bases: int) -> None:
    asked = job(sharing=sharing, schedule=schedule, learners=4)
    with card_side(asked, 10 * GIB, lambda: Memory(141 * GIB, 0)) as side:
        assert side.watch.budget is None
    with (
        pytest.raises(MemoryError, match=f"at least {bases * 10}"),
        card_side(asked, 10 * GIB, lambda: Memory(bases * 10 * GIB, 0)),
    ):
        pass


def test_memory_is_read_once_it_no_longer_falls() -> None:
    told = iter([9, 7, 5, 5, 4])
    assert settled(lambda: Memory(10, next(told))) == 5


def test_counters_of_a_producer_that_is_gone_are_removed(tmp_path: Path) -> None:
    for name in ("torch_17_1_0", "torch_170_1_0", "other"):
        (tmp_path / name).touch()
    sweep(17, tmp_path)
    sweep(None, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"torch_170_1_0", "other"}
