"""The waits that users feel, each against its limit; run by `make bench`. Exits 1 if one is missed.

Medians of five, but for the last:

- `coresident --help`, from the shell;
- `coresident verdict` over 5,000 records of about 4 kB;
- what the lab adds to a cell: a `true` cell's whole cost inside a run, from its start to the next one's, less the child's
  own wall time and less one start of a bare Python (the shim's);
- `pretrain prepare`, `train`, `evaluate` and `export` together, with nothing but their defaults, once.
"""

from __future__ import annotations

import hashlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from coresident.lab.records.files import Disk
from coresident.lab.records.schema import (
    Block,
    CellRef,
    Conditions,
    Control,
    MetricValue,
    Phase,
    Record,
    Series,
    StudyRef,
)
from coresident.lab.records.store import Store
from coresident.lab.run.campaign import Options, run
from coresident.lab.run.prepare import expanded, prepare
from coresident.lab.study.cells import Cell
from coresident.lab.study.load import load, load_text
from coresident.lab.study.plan import reconcile
from coresident.lab.study.schema import Study

TIMES = 5
REPETITIONS = 500
CLAIMED = """\
study: many
question: Does a verdict over thousands of records come at once?
workload: command
arms:
  one: {argv: ["true"]}
  other: {argv: ["true"]}
factors: {env.SIZE: [1, 2, 3, 4, 5]}
repetitions: {min: 500}
controls: [exclusive-device, pinned-cpus]
hypotheses:
  faster:
    claim: one takes at most as long as the other
    metric: wall_seconds
    compare: {arm: one, to: other}
    expect: {ratio: {at_most: 1.0}}
"""
QUICK = """\
study: quick
question: What does the lab add to a cell?
workload: command
arms:
  one: {argv: ["true"]}
  other: {argv: ["true"]}
repetitions: {min: 10}
controls: [exclusive-device]
"""


def median_of(measure: Callable[[], float]) -> float:
    """The median of five calls, after one that is not counted."""
    measure()
    return statistics.median(measure() for _ in range(TIMES))


def seconds(argv: Sequence[str], expected: int = 0) -> float:
    """How long a command takes; it must exit with `expected`."""
    start = time.perf_counter()
    done = subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    took = time.perf_counter() - start
    if done.returncode != expected:
        raise SystemExit(f"{' '.join(argv)} exited with {done.returncode}: {done.stderr}")
    return took


class Careless(Disk):
    """Writes without waiting for the disk: these records need not outlive a power cut."""

    def sync(self, descriptor: int) -> None:
        """Does not."""

    def sync_directory(self, path: Path) -> None:
        """Does not."""


def made(study: Study, cell: Cell, members: list[str], repetition: int, noise: random.Random) -> Record:
    """A record of the size and shape that a training's have: about 4 kB."""

    def digest(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()

    wall = (0.9 if cell.arm == "one" else 1.0) * noise.gauss(10, 0.1)
    packages = {f"package.name{number}": f"{number}.{number}.0" for number in range(16)}
    described = {"cpu": "A processor", "kernel": "6.1.0", "python": "CPython 3.12.1", **packages}
    return Record(
        study=StudyRef(name=study.study, fingerprint=digest(study.study)),
        cell=CellRef(
            id=cell.id,
            workload=cell.workload,
            arm=cell.arm,
            factors=dict(cell.factors),
            parameters=dict(cell.parameters),
            hash=cell.hash,
        ),
        conditions=Conditions(hash=digest("conditions"), values=described),
        block=Block(repetition=repetition, generation=0, members=members, position=members.index(cell.id)),
        attempt=1,
        status="ok",
        started=f"2026-01-{1 + repetition // 20:02}T{repetition % 20:02}:00:00.000+00:00",
        duration=wall + 0.02,
        metrics={
            "wall_seconds": MetricValue(value=wall, unit="s"),
            "cpu_seconds": MetricValue(value=0.9 * wall, unit="s"),
            "peak_memory_mib": MetricValue(value=noise.gauss(512, 3), unit="MiB"),
            "step_ms": MetricValue(
                value=100 * wall, unit="ms", samples=[noise.gauss(100 * wall, 1) for _ in range(24)]
            ),
        },
        series={
            "loss": Series(
                digest=digest(str(repetition)), length=24, values=[noise.random() for _ in range(24)]
            )
        },
        digests={f"adapter-{learner}": digest(f"{learner}") for learner in range(2)},
        controls={
            name: Control(asked=True, ran=True, state="passed")
            for name in ("exclusive-device", "pinned-cpus")
        },
        phases=[
            Phase(name=name, start=at, end=at + 1.5) for at, name in enumerate(("load", "warm-up", "train"))
        ],
        telemetry={"samples": 500, "peak_memory_mib": 512.25, "processes": 3, "load_average": [1.0, 1.1]},
        environment={"host": "here", "commit": digest("commit"), "dirty": False, "packages": packages},
        argv=["true"],
    )


def fill(place: Path) -> float:
    """Write a run directory of 5,000 records; returns their mean size in bytes."""
    study = place / "many.yaml"
    study.write_text(CLAIMED, encoding="utf-8")
    loaded = load(study)
    workload, cells = expanded(loaded)
    out = place / "many"
    store, noise = Store(out, Careless()), random.Random(1)
    members = sorted(cell.id for cell in cells)
    sizes = [
        store.add(made(loaded.study, cell, members, repetition, noise)).stat().st_size
        for repetition in range(REPETITIONS)
        for cell in cells
    ]
    (out / "study.yaml").write_text(loaded.text, encoding="utf-8")
    plan = reconcile(None, loaded.study, workload, has_data=False)
    (out / "plan.json").write_text(plan.text(), encoding="utf-8")
    return statistics.mean(sizes)


class Starts:
    """A watcher that notes when cells start, and their records."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.walls: list[float] = []

    def planned(self, study: object, cells: object, out: object) -> None:
        """Not needed."""

    def started(self, cell: object, block: object, attempt: int) -> None:
        """A cell begins."""
        self.times.append(time.perf_counter())

    def ticked(self, seconds: float, events: object) -> None:
        """Not needed."""

    def ended(self, record: Record) -> None:
        """A cell is over."""
        if record.status != "ok":
            raise SystemExit(f"{record.id} is {record.status}: {record.reason}")
        self.walls.append(record.metrics["wall_seconds"].value)

    def note(self, text: str) -> None:
        """Not needed."""


def overhead(place: Path) -> float:
    """The lab's own share of a `true` cell: the median over the cells of five runs of twenty."""
    bare = median_of(lambda: seconds([sys.executable, "-I", "-S", "-c", "pass"]))
    prepared = prepare(load_text(QUICK, "bench"), "cpu")
    costs = []
    for number in range(TIMES):
        watch = Starts()
        run(prepared, Options(place / f"quick-{number}"), watch)
        costs += [
            after - before - wall - bare
            for before, after, wall in zip(watch.times, watch.times[1:], watch.walls, strict=False)
        ]
    return statistics.median(costs)


def from_nothing(place: Path) -> float:
    """From the built-in corpus to an exported model, by the documented commands."""
    cache, trained = str(place / "cache"), str(place / "trained")
    return sum(
        seconds([sys.executable, "-m", "coresident", "pretrain", *words])
        for words in (
            ["prepare", "--out", cache],
            ["train", "--set", f"data.cache_dir={cache}", "--out", trained],
            ["evaluate", trained],
            ["export", trained, "--out", str(place / "model")],
        )
    )


def main() -> int:
    """Measure, print, compare."""
    coresident = [sys.executable, "-m", "coresident"]
    rows: list[tuple[str, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        os.environ["CORESIDENT_LOCKS"] = str(place / "locks")
        rows.append(("coresident --help", median_of(lambda: seconds([*coresident, "--help"])), 0.3))
        rows.append(("the lab's share of a `true` cell", overhead(place), 0.15))
        size = fill(place)
        judged = median_of(lambda: seconds([*coresident, "verdict", str(place / "many")]))
        rows.append((f"coresident verdict, 5000 records of {size / 1000:.1f} kB", judged, 3.0))
        rows.append(("from text to an exported model", from_nothing(place), 180.0))
    for name, took, limit in rows:
        print(f"{'ok' if took <= limit else 'MISSED':<6}  {took:7.3f} s  (limit {limit:g} s)  {name}")
    return int(any(took > limit for _, took, limit in rows))


if __name__ == "__main__":
    sys.exit(main())
