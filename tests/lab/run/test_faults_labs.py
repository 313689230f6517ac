"""Several labs at once: on one run directory, on one device, in one second. None spoils what another measures."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

from coresident.lab.run.locks import device_lock
from coresident.lab.run.machine.devices import cpu

TIMED = 'date +%s%N >> "$PWD/windows"; sleep 0.2; date +%s%N >> "$PWD/windows"\n'


def test_of_two_labs_on_one_run_directory_the_second_is_refused_and_told_who_has_it(lab):
    study = lab.study({"a": 'until test -e "$PWD/go"; do sleep 0.02; done', "b": "true"})
    first = lab.start(study)
    lab.wait(lab.ran)
    status, said = lab.ends(lab.start(study))
    assert status == 2
    assert f"{lab.out} is in use by another lab, held by pid {first.pid}" in said
    assert "wait for it to end, or use another --out" in said
    (lab.place / "go").touch()
    assert lab.ends(first)[0] == 0
    assert set(lab.times().values()) == {1} and len(lab.records()) == 4


def test_two_labs_started_together_on_a_new_directory_measure_each_cell_once(lab):
    study = lab.study({"a": "sleep 0.2", "b": "sleep 0.2"})
    both = [lab.start(study), lab.start(study)]
    statuses = sorted(lab.ends(process)[0] for process in both)
    # Which of them was first is open, and so is whether the second was still in time to be refused.
    assert statuses in ([0, 2], [0, 0])
    assert set(lab.times().values()) == {1} and len(lab.records()) == 4


def test_two_labs_on_one_device_take_turns(lab):
    study = lab.study({"a": TIMED, "b": TIMED})
    both = [lab.start(study, out=lab.place / name) for name in ("one", "other")]
    said = [lab.ends(process) for process in both]
    assert [status for status, _ in said] == [0, 0]
    assert any("waiting for cpu, held by pid" in text for _, text in said)
    times = [int(line) for line in (lab.place / "windows").read_text().split()]
    # Written in the order in which things happened: each start is followed by its own end.
    assert len(times) == 16
    windows = list(zip(times[::2], times[1::2], strict=True))
    assert all(end - start > 150e6 for start, end in windows)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(windows))


def test_a_lab_that_waits_for_a_device_can_be_stopped(lab):
    from signal import SIGINT

    study = lab.study({"a": "true"})
    with device_lock(cpu()):
        process = lab.start(study)
        lab.hears(process, "waiting for cpu")
        process.send_signal(SIGINT)
        status, said = lab.ends(process)
    assert status == 3, "nothing was measured, which is no error"
    assert "stopped while waiting for cpu" in said and "repeat the command to go on" in said
    assert lab.ran() == []


def test_two_trials_in_one_second_have_two_directories(lab):
    words = [
        sys.executable,
        "-m",
        "coresident",
        "try",
        "--repetitions",
        "1",
        "--half-width",
        "0.9",
        "--",
        "true",
        "true",
    ]
    both = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    lab.processes += both
    places = []
    for process in both:
        out, _ = process.communicate(timeout=60)
        places += [
            line.removeprefix("records: ") for line in out.splitlines() if line.startswith("records: ")
        ]
    assert len(set(places)) == 2
    for place in places:
        assert len(list(Path(place).glob("*.json"))) >= 2
