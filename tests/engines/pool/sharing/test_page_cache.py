"""The page cache's state is arranged, and what the kernel really did is read back."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from coresident.engines.pool.sharing import page_cache


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(4 << 20))
    return path


def test_warm_then_cold_then_warm_is_seen_in_the_kernels_own_map(file: Path) -> None:
    assert page_cache.arrange([file], "warm") == 1.0
    cold = page_cache.arrange([file], "cold")
    if cold == 1.0:
        pytest.skip("this file system keeps all of its files in memory")
    assert cold <= page_cache.TOLERANCE
    assert page_cache.arrange([file], "keep") <= page_cache.TOLERANCE
    assert page_cache.arrange([file], "warm") == 1.0


def test_pages_that_somebody_has_mapped_stay_and_fail_the_control(file: Path) -> None:
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as held:
        os.fsync(stream.fileno())
        assert sum(held[::4096]) > 0
        share = page_cache.arrange([file], "cold")
    ruling = page_cache.decide("cold", share)
    assert ruling.passed is False
    assert ruling.reason == f"{100 * share:.1f} % of the base's pages were still in memory"


@pytest.mark.parametrize(
    ("asked", "share", "passed"),
    [
        ("keep", 0.0, True),
        ("keep", 1.0, True),
        ("warm", 1.0, True),
        ("warm", 0.9, False),
        ("cold", 0.0, True),
    ],
)
def test_the_state_that_was_had_decides(asked: str, share: float, passed: bool) -> None:
    assert page_cache.decide(asked, share).passed is passed


def test_the_raw_rate_leaves_the_cache_as_it_is(file: Path) -> None:
    page_cache.arrange([file], "cold")
    before = page_cache.resident([file])
    rate = page_cache.raw_rate(file)
    assert rate is None or rate > 0
    assert page_cache.resident([file]) == pytest.approx(before, abs=0.01)
