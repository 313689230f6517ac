"""Times are of work that is done, rows are written once, and what is not finite is named by its update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pretrain.directory import METRICS, Rows, lines
from coresident.engines.pretrain.recorder import NonFinite, Recorder, Told
from coresident.engines.pretrain.update import Figures


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def recorder(place: Path, clock: Clock, **more: Any) -> Recorder:
    return Recorder(Rows(place, 0), rejected=torch.zeros(()), clock=clock, **{"mixture": False, **more})


def add(to: Recorder, update: int, loss: float = 2.0, norm: float = 1.0) -> None:
    to.begin()
    one = Told(update, 0, 100, 100 * update, 0.1, "abc")
    to.add(one, Figures(torch.tensor(loss), torch.tensor(0.5), torch.tensor(norm)))


def test_rates_without_and_with_what_lies_between_windows(tmp_path: Path) -> None:
    clock = Clock()
    one = recorder(tmp_path, clock)
    add(one, 1)
    clock.now += 10
    first = one.flush()
    clock.now += 90  # validation, a checkpoint
    add(one, 2)
    clock.now += 1
    add(one, 3)
    clock.now += 1
    second = one.flush()
    assert first is not None and second is not None
    assert (first["tokens_per_second"], first["elapsed_tokens_per_second"], first["first"]) == (
        10.0,
        10.0,
        True,
    )
    assert (second["tokens_per_second"], second["elapsed_tokens_per_second"]) == (100.0, 300 / 102)
    assert (second["training_seconds"], second["elapsed_seconds"]) == (12.0, 102.0)
    assert (one.steady_rate(), one.first_seconds, one.session_targets) == (100.0, 10.0, 300)
    assert "first" not in second


def test_earlier_sessions_count_in_the_aggregate_only(tmp_path: Path) -> None:
    clock = Clock()
    one = recorder(tmp_path, clock, training=50.0, elapsed=80.0)
    clock.now += 30  # startup is no part of either
    add(one, 8)
    clock.now += 5
    told = one.flush()
    assert told is not None
    assert (told["training_seconds"], told["elapsed_seconds"], one.session_seconds) == (55.0, 85.0, 5.0)


def test_an_empty_window_says_nothing(tmp_path: Path) -> None:
    one = recorder(tmp_path, Clock())
    assert one.flush() is None
    assert one.steady_rate() is None
    assert lines(tmp_path / METRICS) == []


def test_the_update_that_was_not_finite_is_named_and_those_before_are_written(tmp_path: Path) -> None:
    one = recorder(tmp_path, Clock())
    for update in (1, 2, 3, 4):
        add(one, update, norm=float("nan") if update == 3 else 1.0)
    one.rejected.fill_(3)
    with pytest.raises(
        NonFinite, match="the gradient's norm is nan at update 3; nothing moved since update 2"
    ):
        one.flush()
    assert [row["update"] for row in lines(tmp_path / METRICS)] == [1, 2]


def test_the_auxiliary_loss_is_told_where_there_are_experts(tmp_path: Path) -> None:
    for mixture in (False, True):
        place = tmp_path / str(mixture)
        place.mkdir()
        clock = Clock()
        one = recorder(place, clock, mixture=mixture)
        add(one, 1)
        clock.now += 1
        one.flush()
        assert ("auxiliary" in lines(place / METRICS)[0]) is mixture
