"""SIGKILL of the lab at every step of its writing, and in the midst of a cell: the next run does exactly what is missing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from coresident.lab.run.campaign import read_plan
from coresident.lab.study.load import Loaded, load

# A lab that kills itself before the Nth step that touches the disk (0: never). Each life is forked from one process
# that has imported everything, so that hundreds of them take seconds.
LIVES = """
import os, signal, sys
from pathlib import Path
from coresident.lab.records.files import Disk
from coresident.lab.run.campaign import Options, run
from coresident.lab.run.edges import Edges
from coresident.lab.run.machine.devices import cpu
from coresident.lab.run.machine.environment import conditions
from coresident.lab.run.prepare import prepare
from coresident.lab.study.load import load

class Mortal(Disk):
    def __init__(self, last):
        self.steps, self.last = 0, last

    def step(self):
        self.steps += 1
        if self.steps == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def create(self, aside):
        self.step()
        return super().create(aside)

    def write(self, descriptor, content):
        self.step()
        # In two pieces, so that there is a step at which a file is not whole.
        return super().write(descriptor, content[:-1] if len(content) > 1 else content)

    def sync(self, descriptor):
        self.step()
        super().sync(descriptor)

    def link(self, aside, path):
        self.step()
        super().link(aside, path)

    def rename(self, aside, path):
        self.step()
        super().rename(aside, path)

    def unlink(self, aside):
        self.step()
        super().unlink(aside)

    def sync_directory(self, path):
        self.step()
        super().sync_directory(path)

class Quiet:
    def __getattr__(self, name):
        return lambda *_: None

# What is known of this host is found out once, for all lives.
conditions(cpu(), "command", [], [], Path.cwd())
for line in sys.stdin:
    last, out, study = line.split()
    life = os.fork()
    if life == 0:
        os.environ["RAN"] = out + ".ran"
        run(prepare(load(study), "cpu"), Options(Path(out)), Quiet(), Edges(disk=Mortal(int(last))))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(life, 0)[1]), flush=True)
"""


class Lives:
    """Runs of studies, each in a process of its own."""

    def __init__(self, lab) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LIVES],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0,
        )  # fmt: skip
        lab.processes.append(self.process)
        self.studies = lab.place / "studies"
        self.studies.mkdir()

    def live(self, loaded: Loaded, out: Path, last: int = 0) -> int:
        """One run of the study into `out` that is killed before step `last`: how it ended."""
        study = self.studies / f"{hash(loaded.text)}.yaml"
        study.write_text(loaded.text)
        self.process.stdin.write(f"{last} {out} {study}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@pytest.fixture
def lives(lab) -> Lives:
    return Lives(lab)


def stored(out: Path) -> Counter[tuple[str, int]]:
    """(arm, repetition) of the records; each file of the store is whole JSON or a writer's that was left aside."""
    found: Counter[tuple[str, int]] = Counter()
    for path in (out / "records").glob("*.json"):
        record = json.loads(path.read_bytes())
        assert record["status"] == "ok" and record["block"]["generation"] == 0
        found[record["cell"]["arm"], record["block"]["repetition"]] += 1
    for name in ("plan.json", "study.yaml"):
        assert not (out / name).exists() or (out / name).read_text().endswith("\n")
    return found


def executed(out: Path) -> Counter[tuple[str, int]]:
    ran = Path(f"{out}.ran")
    parts = [Path(line).parts for line in ran.read_text().splitlines()] if ran.exists() else []
    return Counter((one[-4].rpartition("-")[0], int(one[-3][1:])) for one in parts)


@pytest.mark.slow
def test_killed_at_any_step_of_writing_the_next_run_does_exactly_what_is_missing(lab, lives):
    study = lab.study({"a": "true", "b": "true"})
    planned = Counter({(arm, repetition): 1 for arm in "ab" for repetition in (0, 1)})
    deaths = 0
    for step in range(1, 200):
        out = lab.place / f"killed-{step}"
        ended = lives.live(study, out, step)
        before, already = stored(out), executed(out)
        if ended == 0:
            assert before == already == planned
            break
        deaths += 1
        assert ended == -signal.SIGKILL
        assert before <= planned and before <= already
        assert sum((already - before).values()) <= 1, "of what ran, at most the last one was not yet stored"
        assert lab.alive() == []
        # What is half written would make this refuse or measure too much.
        assert lives.live(study, out) == 0
        assert executed(out) - already == planned - before
        assert stored(out) == planned
        assert not [one for one in out.rglob("*") if one.name.startswith(".aside")]
        assert lives.live(study, out) == 0
        assert sum(executed(out).values()) == sum((already + planned - before).values()), (
            "nothing is repeated"
        )
    # Two documents, two directories and four records, of several steps each.
    assert deaths > 30


def test_a_resume_that_is_killed_as_well_still_ends_with_each_cell_once(lab, lives):
    study = lab.study({"a": "true", "b": "true"})
    # The documents take about 20 steps of each life, so that a record is stored in one life in a few.
    for out in (lab.place / "twice-19", lab.place / "twice-23", lab.place / "twice-26"):
        deaths = 0
        before = stored(out)
        while deaths < 60 and lives.live(study, out, int(out.name[-2:])) != 0:
            deaths += 1
            assert before <= stored(out), "no record is ever lost"
            before = stored(out)
        assert 1 < deaths < 60
        assert lives.live(study, out) == 0
        assert set(stored(out).values()) == {1} and len(stored(out)) == 4


def test_killed_at_any_step_a_claim_that_came_after_data_never_passes_for_an_earlier_one(lab, lives):
    arms, one = {"a": lab.metric(10), "b": lab.metric(5)}, {"min": 1}
    late = lab.study(arms, {"expect": {"ratio": {"at_least": 1.0}}}, repetitions=one)
    for step in range(1, 100):
        out = lab.place / f"claimed-{step}"
        assert lives.live(lab.study(arms, repetitions=one), out) == 0
        ended = lives.live(late, out, step)
        # What `coresident verdict` would go by now.
        plan = read_plan(out)
        assert plan is not None and set(load(out / "study.yaml").study.hypotheses) <= plan.post_hoc
        if ended == 0:
            break
    assert step > 10


def test_killed_during_a_cell_nothing_of_it_is_left_and_the_next_run_goes_on(lab):
    # The first time it is run, arm b starts a stubborn grandchild in a session of its own, and never ends.
    stubborn = """
        test -e "$PWD/tried" && exit 0
        touch "$PWD/tried"
        setsid sh -c 'trap "" TERM; while :; do sleep 0.05; done' &
        sleep 60
    """
    study = lab.study({"a": "true", "b": stubborn}, grace=0.3)
    process = lab.start(study)
    lab.wait(lambda: (lab.place / "tried").exists() and len(lab.alive()) >= 3)
    process.kill()
    process.wait()
    lab.wait(lambda: not lab.alive(), 10)
    before = lab.records()
    assert ("b", 0) in lab.times() and "b" not in {record.cell.arm for record in before}
    assert lab.ends(lab.start(study))[0] == 0
    assert lab.times() == {("a", 0): 1, ("b", 0): 2, ("a", 1): 1, ("b", 1): 1}
    assert [record.status for record in lab.records()] == ["ok"] * 4
    assert lab.records("b")[0].attempt == 2, "what the killed attempt left is not written over"


def test_the_device_stays_locked_until_nothing_of_a_killed_lab_s_cell_is_left(lab):
    # Otherwise the next run would measure beside what the last one's cell still does in its grace.
    lingering = """
        test -e "$PWD/gone" && exit 0
        trap 'sleep 1; date +%s%N > gone; exit' TERM
        touch "$PWD/tried"
        while :; do sleep 0.05; done
    """
    study = lab.study({"a": lingering}, grace=5, repetitions={"min": 1})
    process = lab.start(study)
    lab.wait((lab.place / "tried").exists)
    process.kill()
    process.wait()
    began = time.monotonic()
    lab.run(study)
    assert time.monotonic() - began > 0.8, "it waited for the trap's second"
    assert any(note.startswith("waiting for cpu") for note in lab.watch.notes)
    assert (lab.place / "gone").exists()
    assert [record.status for record in lab.records()] == ["ok"]
