"""The card's answers: named throttling here; the real driver where there is one."""

import subprocess
import sys

import pytest

from coresident.lab.run.machine import nvml


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (0x0, ()),
        (0x1, ()),
        (0x4, ("software power cap",)),
        (0x48, ("hardware slowdown", "hardware thermal slowdown")),
        (0x10004, ("software power cap", "unknown reason 0x10000")),
    ],
)
def test_throttling_is_named_and_idleness_is_none(mask, names):
    assert nvml.event_reasons(mask) == names


# In a process of its own: another test may have made a context in this one.
ASKING = """
import os
from coresident.lab.run.machine import nvml

driver = nvml.connect()
assert driver.cards()
for card in driver.cards():
    assert 0 <= driver.memory_used(card.uuid) < card.memory_total
    assert driver.facts(card.uuid)["driver"]
    assert driver.reading(card.uuid).power > 0
    assert os.getpid() not in (driver.holders(card.uuid) or [])
"""


@pytest.mark.gpu
def test_a_real_card_answers_by_uuid_without_a_context_of_ours():
    subprocess.run([sys.executable, "-c", ASKING], check=True)


@pytest.mark.gpu
def test_an_unknown_uuid_is_unreadable():
    with pytest.raises(nvml.Unreadable):
        nvml.connect().memory_used("GPU-00000000-0000-0000-0000-000000000000")
