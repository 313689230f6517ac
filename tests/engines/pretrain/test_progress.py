"""What a training says: few lines, each with what is left, and everything that was evaluated."""

from __future__ import annotations

from typing import Any

import pytest

from coresident.engines.pretrain.progress import Progress, _clock


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def window(update: int) -> dict[str, Any]:
    return {"update": update, "epoch": 0, "loss": 2.5, "tokens_per_second": 100.0, "targets": 100 * update}


def test_a_line_now_and_then_and_the_state_each_time() -> None:
    said: list[str] = []
    state: list[str] = []
    told: list[tuple[int, int]] = []
    clock = Clock()
    progress = Progress(said.append, state.append, lambda *given: told.append(given), clock)
    progress.started(0, 10_000)
    for update in range(1, 101):
        clock.now += 1
        progress.window(window(update), 3)
    assert len(state) == len(told) == 100
    assert told[-1] == (10_000, 10_000)
    assert len(said) == 5
    assert said[0] == "update 1  epoch 1/3  1.0 %  loss 2.5000  100 targets/s"
    assert said[1].endswith("  1m09s left")
    assert said[-1].startswith("update 100  epoch 1/3  100.0 %") and "left" not in said[-1]


def test_a_resumed_training_says_from_where_and_counts_its_own_speed_only() -> None:
    said: list[str] = []
    clock = Clock()
    progress = Progress(said.append, clock=clock)
    progress.started(5_000, 10_000)
    clock.now += 100  # compilation
    progress.window(window(51), 3)
    clock.now += 40
    progress.window(window(61), 3)
    assert said[0] == "going on after 5,000 of 10,000 targets"
    assert said[-1].endswith("2m36s left")


def test_families_are_told_where_there_are_several() -> None:
    said: list[str] = []
    progress = Progress(said.append)
    progress.evaluated(7, {"loss": 2.0, "families": {"web": 2.0}}, final=False)
    progress.evaluated(9, {"loss": 2.0, "families": {"code": 1.0, "prose": 3.0}}, final=True)
    assert said == [
        "update 7  validation loss 2.0000",
        "update 9  validation (all) loss 2.0000  code 1.0000  prose 3.0000",
    ]


@pytest.mark.parametrize(("seconds", "text"), [(3, "3s"), (61, "1m01s"), (3600, "1h00m"), (9000, "2h30m")])
def test_a_time_is_readable(seconds: float, text: str) -> None:
    assert _clock(seconds) == text
