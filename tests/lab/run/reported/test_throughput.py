"""Throughput of several workers: never more than the device did."""

from __future__ import annotations

import pytest

from coresident.lab.records.schema import Worker
from coresident.lab.run.reported.throughput import throughput


def worker(start: float, end: float, work: float = 100.0, unit: str = "tokens") -> Worker:
    return Worker(id=f"{start}", start=start, end=end, work=work, unit=unit)


def test_it_is_all_work_over_the_whole_window() -> None:
    rate = throughput([worker(10, 20), worker(10, 20), worker(15, 30)])
    assert rate is not None and (rate.value, rate.unit) == (300 / 20, "tokens/s")


def test_staggered_windows_are_not_summed_to_more_than_was_done() -> None:
    rate = throughput([worker(0, 10), worker(10, 20), worker(20, 30)])
    assert rate is not None and rate.value == 10


@pytest.mark.parametrize(
    "workers", [[], [worker(0, 1), worker(0, 1, unit="steps")], [worker(5, 5)], [worker(0, 1e-300, 1e300)]]
)
def test_there_is_none_without_workers_one_unit_or_a_window(workers: list[Worker]) -> None:
    assert throughput(workers) is None
