"""What lies below a process, what it occupies, and how busy the host is: read from the kernel, tolerant of
vanishing."""

import os
import time

import pytest

from coresident.lab.run.machine import processes

LEAF = "import os; print(os.getpid(), flush=True); input()"
RUN = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.parametrize("look", [processes.below, lambda pid: processes._below_by_scan(pid, processes.PROC)])
def test_grandchildren_are_found_and_the_process_itself_is_not(python, look):
    parent = python(RUN, RUN, LEAF)
    leaf = int(parent.stdout.readline())
    found = look(parent.pid)
    assert len(found) == 2
    assert leaf in found
    assert parent.pid not in found


def test_children_of_a_thread_other_than_the_first_are_found(python):
    parent = python(
        "import subprocess, sys, threading\n"
        "run = lambda: subprocess.run([sys.executable, '-c', sys.argv[1]])\n"
        "threading.Thread(target=run).start()",
        LEAF,
    )
    leaf = int(parent.stdout.readline())
    assert processes.below(parent.pid) == [leaf]


def test_below_a_process_that_is_gone_is_nothing(python):
    process = python("")
    process.wait()
    assert processes.below(process.pid) == []
    assert processes.footprint(process.pid) is None


def test_private_memory_counts_in_full(python):
    process = python("block = bytearray(b'x') * (64 << 20); print('full', flush=True); input()")
    process.stdout.readline()
    found = processes.footprint(process.pid)
    assert 64 * 1024 < found.pss < 80 * 1024
    assert found.peak_rss >= found.rss >= found.pss
    assert found.name.startswith("python")


def test_shared_memory_counts_by_its_share(python):
    process = python(
        "import mmap, os, signal\n"
        "def ready(): sum(block[::4096]); os.write(1, b'%d\\n' % os.getpid()); signal.pause()\n"
        "block = mmap.mmap(-1, 64 << 20)\n"
        "block.write(b'x' * (64 << 20))\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0: ready()\n"
        "ready()"
    )
    family = [int(process.stdout.readline()) for _ in range(4)]
    found = [processes.footprint(pid) for pid in family]
    total = sum(one.pss for one in found) / 1024
    assert 64 < total < 100
    assert sum(one.rss for one in found) / 1024 > 4 * 64
    for pid in family:
        if pid != process.pid:
            os.kill(pid, 9)


def test_memory_that_may_not_be_read_is_none_and_not_zero(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7/status").write_bytes(b"Name:\tx\nVmHWM:\t 20 kB\nVmRSS:\t 10 kB\n")
    found = processes.footprint(7, tmp_path)
    assert (found.pss, found.rss, found.peak_rss) == (None, 10, 20)


def test_the_hosts_busy_time_grows_with_work():
    before = processes.host()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass
    after = processes.host()
    assert after.busy - before.busy > 0.1
    assert after.available_mib > 0
