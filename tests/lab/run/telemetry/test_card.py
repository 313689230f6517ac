"""A card's memory above idle, its energy where that can be trusted, its throttling, and who else computes
on it."""

from dataclasses import replace

import pytest

from coresident.lab.run.machine.nvml import Reading
from coresident.lab.run.telemetry import card as card_telemetry
from coresident.lab.run.telemetry.card import CardSampler


@pytest.fixture(autouse=True)
def every_sample_is_a_full_one(monkeypatch):
    monkeypatch.setattr(card_telemetry, "SLOW_INTERVAL", 0.0)


def test_peak_memory_is_the_whole_cards_less_the_idle_cards(card, cuda):
    card.used = [400.0, 5000.0, 9000.5, 800.0]
    sampler = CardSampler(card, cuda.uuid)
    for _ in range(4):
        sampler.sample({1})
    found = sampler.stop(1.0)
    assert (found["device_idle_mib"], found["device_peak_used_mib"]) == (400.0, 9000.5)
    assert found["peak_device_memory_mib"] == 8600.5


def test_memory_that_was_unreadable_once_gives_no_peak(card, cuda):
    card.used = [400.0, None, 500.0]
    sampler = CardSampler(card, cuda.uuid)
    assert sampler.sample({1})["used_mib"] is None
    sampler.sample({1})
    found = sampler.stop(1.0)
    assert found["peak_device_memory_mib"] is None
    assert "could not be read 1 times" in found["peak_device_memory_reason"]


def test_energy_is_the_counters_difference_gross_and_less_idle(card, cuda):
    card.joules = [1000.0, 4000.0]
    found = CardSampler(card, cuda.uuid).stop(10.0)
    assert (found["energy_joules"], found["energy_net_joules"]) == (3000.0, 2100.0)
    assert "host's energy is not measured" in found["energy_note"]


@pytest.mark.parametrize(
    ("joules", "window", "reason"),
    [
        ([1000.0, 1400.0], 4.9, "the window of 4.9 s is shorter than 5 s"),
        ([None], 10.0, "no energy counter"),
        ([1000.0, 10.0], 10.0, "went back"),
    ],
)
def test_energy_that_cannot_be_trusted_is_none_with_a_reason(card, cuda, joules, window, reason):
    card.joules = joules
    found = CardSampler(card, cuda.uuid).stop(window)
    assert found["energy_joules"] is None
    assert found["energy_net_joules"] is None
    assert reason in found["energy_reason"]


def test_throttling_at_any_time_is_kept_with_its_count(card, cuda):
    sampler = CardSampler(card, cuda.uuid)
    rest = card.now
    for reasons in ((), ("software power cap",), ("software power cap", "hardware slowdown"), ()):
        card.now = replace(rest, throttled=reasons)
        sampler.sample({1})
    assert sampler.stop(1.0)["throttled"] == {"hardware slowdown": 1, "software power cap": 2}


def test_power_and_clocks_are_summarised_and_absent_ones_stay_absent(card, cuda):
    sampler = CardSampler(card, cuda.uuid)
    for power in (100.0, 300.0, None):
        card.now = Reading(power=power, sm_clock=1000)
        sampler.sample({1})
    found = sampler.stop(1.0)
    assert found["power_w"] == {"least": 100.0, "mean": 200.0, "most": 300.0}
    assert found["sm_mhz"]["most"] == 1000
    assert found["temperature_c"] is None


def test_foreign_processes_are_those_beside_the_cells_own(card, cuda):
    sampler = CardSampler(card, cuda.uuid)
    for holding in ([], [10], [10, 99], [10]):
        card.holding = holding
        sampler.sample({10, 11})
    assert sampler.stop(1.0)["foreign_pids"] == [99]


@pytest.mark.parametrize("holding", [None, [], [5001, 5002]])
def test_processes_of_another_pid_namespace_prove_nothing(card, cuda, holding):
    card.holding = holding
    sampler = CardSampler(card, cuda.uuid)
    sampler.sample({10, 11})
    assert sampler.stop(1.0)["foreign_pids"] is None
