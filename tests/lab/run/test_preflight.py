"""What cannot be measured is refused before it starts; a device left dirty is told after."""

import os
import re
import time

import pytest

from coresident import available
from coresident.errors import MachineError
from coresident.lab.run import preflight
from coresident.lab.run.machine.devices import cpu
from coresident.workload import Needs

GIB = 2**30


def test_a_cell_that_fits_in_memory_passes():
    preflight.memory(Needs(memory=2**20))
    # What lies on a card is not asked of the host.
    preflight.memory(Needs(memory=2**60, on_card=2**60), card=True)


def test_missing_memory_is_told_in_size():
    asked = available.memory() + 3 * GIB
    with pytest.raises(MachineError, match=r"the cell needs at least .* (2\.9|3\.[01]) GiB is missing"):
        preflight.memory(Needs(memory=asked))


def test_a_control_groups_free_memory_bounds_the_hosts(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    assert available.memory(tmp_path) == 8 * GIB
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/self/mountinfo").write_text("1 1 0:1 / /cg rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "cg").mkdir()
    (tmp_path / "cg/memory.max").write_text(f"{3 * GIB}\n")
    (tmp_path / "cg/memory.current").write_text(f"{GIB}\n")
    assert available.memory(tmp_path) == 2 * GIB
    with pytest.raises(MachineError, match=r"2\.5 GiB of memory and 2\.0 GiB is free: 512 MiB is missing"):
        preflight.memory(Needs(memory=5 * GIB // 2), tmp_path)


def test_a_writable_place_with_room_passes_and_is_not_created(tmp_path):
    preflight.disk(tmp_path / "runs" / "new")
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk_is_told(tmp_path):
    with pytest.raises(MachineError, match=r"GiB is free on the disk of .* at least .* is needed"):
        preflight.disk(tmp_path / "run", least=2**60)


def test_a_file_in_the_way_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="is no directory"):
        preflight.disk(tmp_path / "file" / "run")


def test_an_unwritable_place_is_told(tmp_path, python):
    (tmp_path / "closed").mkdir(mode=0o500)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    code = (
        "import os, sys; from pathlib import Path; from coresident.lab.run import preflight\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "try: preflight.disk(Path(sys.argv[1]))\n"
        "except Exception as error: print(error)"
    )
    assert "is not writable" in python(code, str(tmp_path / "closed" / "run")).stdout.readline()


def test_the_cpu_has_no_device_memory_to_be_dirty():
    assert preflight.device_clean(cpu(), 0.0) == 0.0
    assert preflight.leak(cpu(), 0.0, 0.0) is None


def test_a_clean_device_passes_with_its_use(card, cuda):
    card.used = [412.0]
    assert preflight.device_clean(cuda, 500, card) == 412.0


def test_a_device_in_use_is_refused_naming_mib_and_pids(card, cuda):
    card.used, card.holding = [2048.0], [os.getpid(), 4_000_000]
    with pytest.raises(MachineError) as caught:
        preflight.device_clean(cuda, 500, card, patience=0)
    assert re.search(
        rf"2048 MiB are in use .*limit: 500 MiB.*held by pid {os.getpid()} \(.+\), 4000000$",
        caught.value.problem,
    )
    assert "clean_device_mib" in caught.value.remedy


@pytest.mark.parametrize("holding", [None, []])
def test_hidden_holders_are_said_to_be_hidden(card, cuda, holding):
    card.used, card.holding = [2048.0], holding
    with pytest.raises(MachineError, match="its holders cannot be seen"):
        preflight.device_clean(cuda, 500, card, patience=0)


def test_unreadable_memory_refuses_to_measure(card, cuda):
    card.used = [None]
    with pytest.raises(MachineError, match="cannot be read"):
        preflight.device_clean(cuda, 500, card, patience=0)


def test_memory_of_a_process_that_just_ended_is_waited_for(card, cuda):
    card.used = [9000.0, None, 4000.0, 20.0]
    assert preflight.device_clean(cuda, 500, card) == 20.0
    card.used = [9000.0, 4000.0, 20.0]
    assert preflight.leak(cuda, 20.0, 500, card) is None


def test_the_wait_has_an_end(card, cuda):
    card.used = [9000.0]
    start = time.monotonic()
    said = preflight.leak(cuda, 20.0, 500, card, patience=0.2)
    assert 0.15 < time.monotonic() - start < 10
    assert (
        said
        == f"9000 MiB are still in use on device {cuda.uuid} after the cell (before: 20 MiB, limit: 500 MiB)"
    )


def test_a_card_that_no_longer_answers_is_a_leak(card, cuda):
    card.used = [None]
    assert "cannot be read after the cell" in preflight.leak(cuda, 20.0, 500, card, patience=0)
