"""Telemetry of a real cell: its memory summed over processes, who else worked, where it ran, and what
watching cost."""

import json
import os
import subprocess
import sys
import time

import pytest

from coresident.lab.run.machine.cores import allowed
from coresident.lab.run.machine.devices import cpu
from coresident.lab.run.telemetry import sampler as telemetry
from coresident.lab.run.telemetry.sampler import Sampler

# What is to be looked at several times lasts two seconds: the dearer a look is, the rarer they are.
# Stands for the shim: starts what it is given and waits for it.
SHIM = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"


def watch(out, code, sampler=None, seconds=20.0):
    """Run a cell to its end under a sampler that ticks as the lab does."""
    sampler = sampler or Sampler(cpu(), out)
    shim = subprocess.Popen([sys.executable, "-c", SHIM, code])
    end = time.monotonic() + seconds
    while shim.poll() is None and time.monotonic() < end:
        sampler.tick(shim.pid)
        time.sleep(0.005)
    shim.kill()
    shim.wait()
    return sampler.stop()


@pytest.fixture
def out(tmp_path):
    return tmp_path / "telemetry" / "samples.jsonl"


def test_the_peak_is_of_the_sum_over_processes_and_each_has_its_own(out):
    found = watch(
        out,
        "import contextlib, mmap, os, time\n"
        "block = mmap.mmap(-1, 40 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        # The kernel may merge small pages into a huge one, and gives each process a copy of its own for that.
        "with contextlib.suppress(OSError): block.madvise(mmap.MADV_NOHUGEPAGE)\n"
        "block.write(b'x' * (40 << 20))\n"
        "if os.fork() == 0:\n"
        "    own = bytearray(b'y') * (60 << 20); time.sleep(2); os._exit(0)\n"
        "os.wait()",
    )
    assert 100 < found["peak_memory_mib"] < 130
    assert found["samples"] > 3
    peaks = [one["peak_pss_mib"] for one in found["per_process"]]
    assert len(peaks) == 2
    assert peaks == sorted(peaks, reverse=True)
    assert 60 < peaks[0] < 100
    assert all(one["peak_rss_mib"] >= one["peak_pss_mib"] for one in found["per_process"])
    json.dumps(found, allow_nan=False)


def test_the_series_over_time_is_written_by_process(out):
    found = watch(out, "import time; time.sleep(2)")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == found["samples"]
    assert [row["t"] for row in rows] == sorted(row["t"] for row in rows)
    assert max(row["pss_mib"] for row in rows) == found["peak_memory_mib"]
    for row in rows:
        assert row["pss_mib"] == pytest.approx(sum(row["processes"].values()), abs=0.01)
        assert row["available_mib"] > 0


def test_the_series_is_bounded_and_the_peak_misses_nothing(out, monkeypatch):
    monkeypatch.setattr(telemetry, "ROWS", 4)
    monkeypatch.setattr(telemetry, "SHORTEST", 0.0)
    monkeypatch.setattr(telemetry, "BUDGET", 10.0)
    found = watch(out, "import time; time.sleep(0.6)")
    assert found["samples"] > 40
    assert len(out.read_text().splitlines()) < 30


def test_a_cell_too_short_to_be_seen_has_no_peak_and_says_so(out):
    found = Sampler(cpu(), out).stop()
    assert found["peak_memory_mib"] is None
    assert found["peak_memory_reason"] == "the cell ended before it could be sampled"
    assert found["samples"] == 0
    assert not out.exists()


def test_the_first_sample_comes_soon_after_the_cell_starts(out):
    watch(out, "import time; time.sleep(0.5)")
    assert json.loads(out.read_text().splitlines()[0])["t"] < 0.5


def test_watching_costs_little_however_much_is_mapped(out):
    start = time.monotonic()
    found = watch(
        out,
        "import os, time\nblock = bytearray(b'x') * (200 << 20)\nfor _ in range(2): os.fork()\ntime.sleep(3)",
    )
    assert found["processes"] >= 4
    # Each sample is paid for by the pause after it, and the end came before the last one was.
    unpaid = 2 * found["sampling_cpu_seconds"] / found["samples"]
    assert found["sampling_cpu_seconds"] < 0.04 * (time.monotonic() - start) + unpaid
    assert found["longest_interval_s"] > telemetry.SHORTEST


def test_the_cells_own_work_is_not_foreign(out):
    # Others may well work on the machine that runs this test.
    before, earlier = telemetry.processes.host().busy, os.times()
    found = watch(out, "import time\nwhile time.process_time() < 0.5: pass")
    busy, later = telemetry.processes.host().busy - before, os.times()
    own = later.children_user - earlier.children_user + later.children_system - earlier.children_system
    assert own >= 0.5
    assert found["foreign_cpu_seconds"] <= busy - own + 0.05


def test_work_of_others_is_foreign(out, python):
    neighbour = python("print('busy', flush=True)\nwhile True: pass")
    neighbour.stdout.readline()
    found = watch(out, "import time; time.sleep(0.6)")
    assert found["foreign_cpu_seconds"] > 0.3


def test_where_processes_ran_is_kept(out):
    core = allowed()[-1]
    found = watch(out, f"import os, time; os.sched_setaffinity(0, {{{core}}}); time.sleep(2)")
    (entry,) = [one for one in found["affinity"] if one["cpus"] == [core]]
    assert entry["processes"] == 1
    assert entry["sightings"] > 2


@pytest.mark.parametrize("looks", [telemetry.SETTLED, 0], ids=["as it is", "only now and then"])
def test_one_that_comes_late_and_goes_soon_is_looked_at(out, monkeypatch, looks):
    monkeypatch.setattr(telemetry, "RARELY", 10_000)
    monkeypatch.setattr(telemetry, "SETTLED", looks)
    core = allowed()[-1]
    found = watch(
        out,
        "import os, time\n"
        "time.sleep(0.5)\n"
        f"if os.fork() == 0: os.sched_setaffinity(0, {{{core}}}); time.sleep(1.5); os._exit(0)\n"
        "os.wait()",
    )
    assert ([core] in [one["cpus"] for one in found["affinity"]]) == (looks > 0)


def test_a_step_of_the_wall_clock_is_seen_and_changes_no_duration(out, monkeypatch):
    sampler = Sampler(cpu(), out)
    stepped = time.time() - 3600
    monkeypatch.setattr(time, "time", lambda: stepped)
    found = sampler.stop()
    assert found["clock_step_s"] == pytest.approx(-3600, abs=1)
    assert found["window_s"] < 1


def test_unreadable_memory_gives_no_peak(out, monkeypatch):
    real = telemetry.processes.footprint

    def blind(pid):
        found = real(pid)
        return found and telemetry.processes.Footprint(found.pid, found.name, None, found.rss, found.peak_rss)

    monkeypatch.setattr(telemetry.processes, "footprint", blind)
    found = watch(out, "import time; time.sleep(2)")
    assert found["peak_memory_mib"] is None
    assert "could not be read" in found["peak_memory_reason"]
    assert found["per_process"][0]["peak_rss_mib"] > 1


def test_a_cards_peak_is_caught_between_two_looks_at_processes(out, card, cuda, monkeypatch):
    monkeypatch.setattr(telemetry, "SHORTEST", 60.0)
    sampler = Sampler(cuda, out, card)
    shim = subprocess.Popen([sys.executable, "-c", SHIM, "import time; time.sleep(5)"])
    while not out.exists():
        sampler.tick(shim.pid)
    card.used = [8000.0, 3.0]
    for _ in range(3):
        sampler.tick(shim.pid)
    shim.kill()
    shim.wait()
    found = sampler.stop()
    assert (found["samples"], found["device_peak_used_mib"]) == (1, 8000.0)


def test_a_card_is_sampled_beside(out, card, cuda):
    card.used = [100.0, 612.0, 5000.0, 700.0]
    found = watch(out, "import time; time.sleep(0.4)", Sampler(cuda, out, card))
    assert found["peak_device_memory_mib"] == 4900.0
    assert json.loads(out.read_text().splitlines()[-1])["card"]["used_mib"] == 700.0
    json.dumps(found, allow_nan=False)


def test_a_cell_too_short_to_be_sampled_often_has_no_peak(out):
    found = watch(out, "", Sampler(cpu(), out))
    few = Sampler(cpu(), out)
    few._samples, few._peak = telemetry.FEWEST - 1, 2048
    told = few.stop()
    assert told["peak_memory_mib"] is None and told["peak_memory_at_s"] is None
    assert told["peak_memory_reason"] == (
        "seen in 4 of the 5 samples that a peak needs: the cell was too short"
    )
    enough = Sampler(cpu(), out)
    enough._samples, enough._peak = telemetry.FEWEST, 2048
    assert enough.stop()["peak_memory_mib"] == 2
    assert found["samples"] >= telemetry.FEWEST or found["peak_memory_mib"] is None
