"""Sizes are written as people write them, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from coresident.engines.pool import sizes
from coresident.engines.pool.parameters import DPO


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 << 30), ("512 MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("7B", 7), ("2TiB", 2 << 40)],
)
def test_a_size_is_read(text: str, size: int) -> None:
    assert sizes.parse(text) == size


@pytest.mark.parametrize("text", ["80", "GiB", "-1GiB", "80 gib", "1e3MiB", "nan GiB", "0MiB", "80GiB x"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        sizes.parse(text)


def test_a_run_with_a_bad_budget_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="device_memory"):
        DPO(device_memory="80")
    assert DPO(device_memory="80GiB").device_memory == "80GiB"


def test_sizes_are_shown_in_a_unit_that_fits() -> None:
    assert (sizes.show(80 << 30), sizes.show(3 << 19)) == ("80.00 GiB", "1.5 MiB")
