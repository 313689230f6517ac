"""A device is named by what a user writes and known by its UUID; no name is guessed, no context created."""

import pytest

from coresident.errors import MachineError, UserError
from coresident.lab.run.machine import nvml
from coresident.lab.run.machine.devices import cpu, resolve
from coresident.lab.run.machine.nvml import Card

FIRST, SECOND, THIRD = "GPU-aaaa0000-0", "GPU-bbbb0000-1", "GPU-bbbb1111-2"


@pytest.fixture
def three(card):
    card.listed = [Card(i, uuid, "H", 2**30) for i, uuid in enumerate((FIRST, SECOND, THIRD))]
    return card


def uuids(devices):
    return [device.uuid for device in devices]


def test_the_cpu_is_a_device_without_asking_any_driver():
    (found,) = resolve("cpu")
    assert found == cpu()
    assert (found.kind, found.uuid) == ("cpu", "cpu")
    assert found.memory_total > 2**28
    assert found.variables() == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", [FIRST]),
        ("0,2", [FIRST, THIRD]),
        ("2, 1", [THIRD, SECOND]),
        ("cuda", [FIRST]),
        ("cuda:1", [SECOND]),
        (SECOND, [SECOND]),
        ("GPU-bbbb1", [THIRD]),
    ],
)
def test_cards_are_named_by_number_or_uuid(three, text, expected):
    assert uuids(resolve(text, three, {})) == expected


def test_a_cell_sees_its_card_by_uuid_and_no_other(three):
    (found,) = resolve("1", three, {})
    assert found.variables()["CUDA_VISIBLE_DEVICES"] == SECOND


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,0", [THIRD, FIRST]),
        (f"{SECOND},GPU-aaaa", [SECOND, FIRST]),
        ("1,9,0", [SECOND]),
        ("", []),
        ("-1", []),
    ],
)
def test_numbers_count_the_visible_cards_in_their_order(three, visible, expected):
    shown = {"CUDA_VISIBLE_DEVICES": visible}
    for place, uuid in enumerate(expected):
        assert uuids(resolve(str(place), three, shown)) == [uuid]
    with pytest.raises(UserError, match="there is no card"):
        resolve(str(len(expected)), three, shown)


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        ("cpuu", "unknown device 'cpuu'", "did you mean 'cpu'"),
        ("gpu7x", "unknown device 'gpu7x'", ""),
        ("0,,1", "names no device", "write `cpu`"),
        ("", "names no device", ""),
        ("cpu,0", "mixes the CPU with cards", "one kind"),
        ("7", "there is no card '7'", FIRST),
        ("0,cuda:0", "twice", "once"),
        ("GPU-bbbb", "more than one card begins with", SECOND),
        ("GPU-cccc", "no visible card has", FIRST),
    ],
)
def test_a_wrong_name_is_the_users_error_and_says_what_there_is(three, text, problem, remedy):
    with pytest.raises(UserError, match=problem) as caught:
        resolve(text, three, {})
    assert remedy in caught.value.remedy


def test_a_card_in_instances_is_refused(card):
    card.listed = [Card(0, FIRST, "H", 2**30, mig=True)]
    with pytest.raises(MachineError, match="MIG instances"):
        resolve("0", card, {})


def test_without_a_driver_a_card_is_a_clean_refusal():
    try:
        nvml.connect()
    except nvml.NoDriver as why:
        with pytest.raises(MachineError, match="cannot be used: NVML says") as caught:
            resolve("0")
        assert str(why) in caught.value.problem
        assert "cpu" in caught.value.remedy
    else:
        assert resolve("0")[0].uuid.startswith("GPU-")
