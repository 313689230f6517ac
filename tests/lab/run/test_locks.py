"""One lab a run directory, one cell a device: between real processes, and free again when a holder is
killed."""

import os
import signal
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest

from coresident.errors import MachineError
from coresident.lab.run import locks
from coresident.lab.run.locks import RunLock, device_lock, lock_directory
from coresident.lab.run.machine.devices import cpu

HOLD_RUN = """
import sys; from pathlib import Path; from coresident.lab.run.locks import RunLock
with RunLock(Path(sys.argv[1])): print("held", flush=True); sys.stdin.readline()
print("free", flush=True); sys.stdin.readline()
"""
HOLD_DEVICE = """
import sys; from coresident.lab.run.locks import device_lock; from coresident.lab.run.machine.devices import cpu
with device_lock(cpu()): print("held", flush=True); sys.stdin.readline()
print("free", flush=True); sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def own_locks(tmp_path, monkeypatch):
    monkeypatch.setenv(locks.DIRECTORY, str(tmp_path / "locks"))


def holding(python, code, *arguments):
    holder = python(code, *arguments)
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_second_lab_is_refused_and_told_who_holds_the_run(tmp_path, python):
    run = tmp_path / "run"
    holder = holding(python, HOLD_RUN, str(run))
    with pytest.raises(MachineError, match=f"in use by another lab, held by pid {holder.pid}"), RunLock(run):
        pass


def test_the_run_is_free_again_after_its_lab_ends(tmp_path, python):
    run = tmp_path / "run"
    holder = holding(python, HOLD_RUN, str(run))
    holder.stdin.write("\n")
    assert holder.stdout.readline() == "free\n"
    with RunLock(run):
        pass


def test_the_run_is_free_again_after_its_lab_is_killed(tmp_path, python):
    run = tmp_path / "run"
    holder = holding(python, HOLD_RUN, str(run))
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with RunLock(run):
        assert (run / "lock.holder").read_text().split()[0] == str(os.getpid())


def test_a_dead_holders_number_is_not_named(tmp_path, python):
    run = tmp_path / "run"
    dead = python("")
    dead.wait()
    holding(python, HOLD_RUN, str(run))
    (run / "lock.holder").write_text(f"{dead.pid} {os.uname().nodename}\n")
    with pytest.raises(MachineError, match="held by a process that cannot be seen"), RunLock(run):
        pass


def test_two_locks_of_one_process_exclude_each_other_too(tmp_path):
    with RunLock(tmp_path / "run"), pytest.raises(MachineError, match=f"pid {os.getpid()}"):
        RunLock(tmp_path / "run").__enter__()


def test_a_child_that_outlives_its_lab_does_not_keep_the_lock(tmp_path, python):
    run = tmp_path / "run"
    sleeper = "subprocess.Popen(['sleep', '5'], stdout=subprocess.DEVNULL); "
    code = "import subprocess\n" + HOLD_RUN.replace('print("held"', f'{sleeper}print("held"')
    holder = holding(python, code, str(run))
    holder.kill()
    holder.wait()
    with RunLock(run):
        pass


def test_a_run_directory_that_cannot_be_made_is_the_machines_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot lock"):
        RunLock(tmp_path / "file" / "run").__enter__()


def test_a_device_is_waited_for_and_the_wait_is_told_once(python):
    holder = holding(python, HOLD_DEVICE)
    told = []
    threading.Timer(0.35, lambda: holder.stdin.write("\n")).start()
    start = time.monotonic()
    with device_lock(cpu(), told.append):
        assert time.monotonic() - start > 0.25
    assert told == [f"waiting for cpu, held by pid {holder.pid}"]


def test_a_free_device_is_not_waited_for():
    told = []
    with device_lock(cpu(), told.append):
        pass
    with device_lock(cpu(), told.append):
        pass
    assert told == []


def test_a_killed_holders_device_is_free(python):
    holder = holding(python, HOLD_DEVICE)
    holder.kill()
    holder.wait()
    told = []
    with device_lock(cpu(), told.append):
        pass
    assert told == []


def test_waiting_can_be_given_up(python):
    holder = holding(python, HOLD_DEVICE)
    with (
        pytest.raises(MachineError, match=f"stopped while waiting for cpu, held by pid {holder.pid}"),
        device_lock(cpu(), give_up=lambda: True),
    ):
        pass


def test_a_pipe_in_place_of_the_holders_note_is_not_waited_for(tmp_path, python):
    holding(python, HOLD_DEVICE)
    note = lock_directory() / "cpu.holder"
    note.unlink()
    os.mkfifo(note)
    told = []
    with pytest.raises(MachineError), device_lock(cpu(), told.append, give_up=lambda: True):
        pass
    assert told == ["waiting for cpu, held by a process that cannot be seen from here"]


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_in_place_of_the_holders_note_is_not_written_through(tmp_path, link):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    link(victim, lock_directory() / "cpu.holder")
    with device_lock(cpu()):
        pass
    assert victim.read_text() == "precious"


def test_the_shared_directory_is_open_to_all_users_and_sticky(tmp_path):
    before = os.umask(0o077)
    try:
        found = locks._shared(tmp_path / "shared")
    finally:
        os.umask(before)
    assert stat.S_IMODE(found.stat().st_mode) == 0o1777
    assert locks._shared(tmp_path / "shared") == found


@pytest.mark.parametrize("kind", ["link", "file", "private"])
def test_anything_else_in_place_of_the_shared_directory_is_refused(tmp_path, kind):
    place = tmp_path / "shared"
    if kind == "link":
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine").chmod(0o1777)
        place.symlink_to(tmp_path / "mine")
    elif kind == "file":
        place.write_text("")
    else:
        place.mkdir(mode=0o700)
    with pytest.raises(MachineError, match="no directory that all users share") as caught:
        locks._shared(place)
    assert locks.DIRECTORY in caught.value.remedy


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_two_users_wait_for_each_other(monkeypatch, python):
    monkeypatch.delenv(locks.DIRECTORY)
    # Not in pytest's own directory, which is closed to others.
    place = tempfile.TemporaryDirectory()
    Path(place.name).chmod(0o755)
    monkeypatch.setenv(locks.DIRECTORY, str(locks._shared(Path(place.name) / "shared")))
    with device_lock(cpu()):
        pass
    holder = holding(python, HOLD_DEVICE.replace("\nwith", "\nimport os; os.setuid(65534)\nwith"))
    told = []
    with pytest.raises(MachineError), device_lock(cpu(), told.append, give_up=lambda: True):
        pass
    assert told == [f"waiting for cpu, held by pid {holder.pid}"]
