"""The doctor's findings about cards, from a stand-in; and about having none."""

from dataclasses import replace

import pytest

from coresident.lab.run.doctor import checks_card
from coresident.lab.run.machine import nvml


def levels(card):
    return {finding.level for finding in checks_card.findings(card)}


def said(card, level):
    return [
        (finding.what, finding.remedy) for finding in checks_card.findings(card) if finding.level == level
    ]


def test_a_clean_card_is_ok(card):
    assert levels(card) == {"ok"}
    assert any("driver 1.2.3, CUDA 13.0" in what for what, _ in said(card, "ok"))


def test_no_card_is_no_fault(card):
    card.listed = []
    assert levels(card) == {"ok"}


def test_memory_in_use_is_bad_and_names_its_holders(card):
    card.used, card.holding = [900.0], [123456789]
    ((what, _),) = said(card, "bad")
    assert "900 MiB are in use, held by pid 123456789" in what


def test_unreadable_memory_is_bad(card):
    card.used = [None]
    assert "cannot be read" in said(card, "bad")[0][0]


@pytest.mark.parametrize(
    ("fact", "level", "word"),
    [
        ({"mig": "on"}, "bad", "MIG"),
        ({"persistence": "off"}, "warn", "persistence"),
        ({"compute_mode": "2"}, "bad", "prohibits"),
        ({"compute_mode": "3"}, "warn", "one process"),
    ],
)
def test_settings_that_spoil_a_measurement_are_told(card, fact, level, word):
    card.told = {**card.told, **fact}
    ((what, remedy),) = said(card, level)
    assert word in what
    assert remedy


def test_hardware_faults_are_bad(card):
    card.broken = {"uncorrected memory errors": 3}
    assert "3 uncorrected memory errors" in said(card, "bad")[0][0]


def test_throttling_now_is_a_warning(card):
    card.now = replace(card.now, throttled=("hardware thermal slowdown",))
    assert "hardware thermal slowdown" in said(card, "warn")[0][0]


def test_no_energy_counter_is_a_warning(card):
    card.joules = [None]
    assert "no energy counter" in said(card, "warn")[0][0]


def test_device_files_without_a_driver_library_are_bad_and_none_are_fine(tmp_path):
    try:
        nvml.connect()
    except nvml.NoDriver:
        pass
    else:
        pytest.skip("there is a driver here")
    assert [finding.level for finding in checks_card.findings(device_files=tmp_path)] == ["ok"]
    (tmp_path / "nvidia0").write_text("")
    (found,) = checks_card.findings(device_files=tmp_path)
    assert found.level == "bad"
    assert "libnvidia-ml" in found.remedy
