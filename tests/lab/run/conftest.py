"""A stand-in for an NVIDIA card, since tests run where there is none; real processes for everything else; and a whole
lab in a folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from coresident.lab.records.schema import Record
from coresident.lab.records.store import Store
from coresident.lab.run import campaign
from coresident.lab.run.campaign import Finished, Options
from coresident.lab.run.edges import Edges
from coresident.lab.run.machine.devices import Device
from coresident.lab.run.machine.nvml import MIB, Card, Reading, Unreadable
from coresident.lab.run.prepare import expanded, prepare
from coresident.lab.study.load import Loaded, load_text
from coresident.lab.verdict.judge import judge
from coresident.lab.verdict.model import Verdict

UUID = "GPU-11111111-2222-3333-4444-555555555555"

REST = Reading(power=90.0, sm_clock=1980, memory_clock=2619, temperature=40, utilisation=0)


@dataclass
class StandIn:
    """A driver with cards whose answers a test sets. `used` (MiB) gives one value a look, the last one for
    good."""

    listed: list[Card] = field(default_factory=lambda: [Card(0, UUID, "Stand-in", 80 * 2**30)])
    used: list[float | None] = field(default_factory=lambda: [3.0])
    holding: list[int] | None = None
    joules: list[float | None] = field(default_factory=lambda: [1000.0])
    now: Reading = REST
    told: dict[str, str] = field(default_factory=lambda: {"driver": "1.2.3", "cuda": "13.0"})
    broken: dict[str, int] = field(default_factory=dict)

    def cards(self) -> list[Card]:
        return self.listed

    def memory_used(self, uuid: str) -> int:
        value = self.used.pop(0) if len(self.used) > 1 else self.used[0]
        if value is None:
            raise Unreadable("Not Supported")
        return int(value * MIB)

    def holders(self, uuid: str) -> list[int] | None:
        return self.holding

    def energy(self, uuid: str) -> float | None:
        return self.joules.pop(0) if len(self.joules) > 1 else self.joules[0]

    def reading(self, uuid: str) -> Reading:
        return self.now

    def facts(self, uuid: str) -> dict[str, str]:
        return self.told

    def faults(self, uuid: str) -> dict[str, int]:
        return self.broken


@pytest.fixture
def card() -> StandIn:
    return StandIn()


@pytest.fixture
def cuda() -> Device:
    return Device("cuda", UUID, "Stand-in", 0, 80 * 2**30)


@pytest.fixture
def python() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts `python -c CODE` with pipes, and kills at the end what is left of it."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


class Notes:
    """A watcher that keeps what it is told. `on_start` is called as a cell starts."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.started_cells: list[str] = []
        self.on_start: Callable[[], None] = lambda: None

    def planned(self, study: Any, cells: Any, out: Path) -> None: ...

    def started(self, cell: Any, block: Any, attempt: int) -> None:
        self.started_cells.append(cell.arm)
        self.on_start()

    def ticked(self, seconds: float, events: Path) -> None: ...

    def ended(self, record: Record) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


class Lab:
    """A lab with a folder of its own: studies of shell commands, each run of which is counted.

    `RAN` names a file to which every arm appends where it reports to, so that what was executed, and how often, is known
    without asking the lab.
    """

    def __init__(self, place: Path) -> None:
        self.place, self.out, self.watch = place, place / "run", Notes()
        self._ran = place / "ran"
        self.processes: list[subprocess.Popen[str]] = []

    @staticmethod
    def event(**values: Any) -> str:
        """A shell line that reports an event."""
        return f"echo '{json.dumps(values)}' >> \"$CORESIDENT_EVENTS/$$.jsonl\"\n"

    @staticmethod
    def metric(word: Any, name: str = "speed", unit: str = "1/s") -> str:
        """A shell line that reports a metric, whose value is a shell word: 9.5, "$x", NaN, '"9.5"'."""
        line = f'{{"event": "metric", "name": "{name}", "value": %s, "unit": "{unit}"}}\\n'
        return f"printf '{line}' {word} >> \"$CORESIDENT_EVENTS/$$.jsonl\"\n"

    def study(self, arms: Mapping[str, Any], claim: Mapping[str, Any] | None = None, **keys: Any) -> Loaded:
        """A study whose arms are shell scripts (or parameters). `claim` adds the hypothesis H about arms a and b."""
        given = {
            name: {"shell": 'echo "$CORESIDENT_EVENTS" >> "$RAN"\n' + textwrap.dedent(arm)}
            if isinstance(arm, str)
            else arm
            for name, arm in arms.items()
        }
        values = {"arms": given, **keys}
        if claim is not None:
            compare = {"arm": "a", "to": "b"} if "ratio" in claim.get("expect", {}) else {"arm": "a"}
            values["hypotheses"] = {
                "H": {"claim": "as stated", "metric": "speed", "compare": compare, **claim}
            }
        values.setdefault("repetitions", {"min": 2})
        return load_text(
            "study: sample\nquestion: Does it hold?\nworkload: command\narms: {}\n", "sample", values=values
        )

    def run(
        self, loaded: Loaded, edges: Edges | None = None, device: Device | None = None, **options: Any
    ) -> Finished:
        """Measure in this process."""
        prepared = prepare(loaded, "cpu", Store(self.out).records())
        if device is not None:
            prepared = replace(prepared, devices=(device,))
        return campaign.run(prepared, Options(self.out, **options), self.watch, edges)

    def judge(self, loaded: Loaded) -> Verdict:
        """The verdict on what is in the store."""
        return judge(loaded.study, expanded(loaded, Store(self.out).records())[1], Store(self.out).active())

    def records(self, arm: str | None = None) -> list[Record]:
        """All records, in the order in which they were measured, of one arm or of all."""
        found = [one.record for one in Store(self.out).load()]
        return sorted((one for one in found if arm in (None, one.cell.arm)), key=lambda one: one.started)

    def ran(self) -> list[tuple[str, int]]:
        """(arm, repetition) of every execution so far, in order."""
        lines = self._ran.read_text().splitlines() if self._ran.exists() else []
        return [(Path(line).parts[-4].rpartition("-")[0], int(Path(line).parts[-3][1:])) for line in lines]

    def times(self) -> Counter[tuple[str, int]]:
        """How often each (arm, repetition) was executed."""
        return Counter(self.ran())

    def start(
        self, loaded: Loaded, *words: str, out: Path | None = None, output: int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        """`python -m coresident run` on the study, as a process in a group of its own (as a terminal would have it)."""
        path = self.place / "sample.yaml"
        path.write_text(loaded.text)
        process = subprocess.Popen(
            [sys.executable, "-m", "coresident", "run", str(path), "--out", str(out or self.out), *words],
            stdout=output, stderr=output, text=True, process_group=0,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def hears(self, process: subprocess.Popen[str], words: str) -> None:
        """Reads what the process says until it says `words`."""
        assert process.stdout is not None
        while words not in (line := process.stdout.readline()):
            assert line, f"it ended without saying {words!r}"

    def ends(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """(exit status, all that it wrote)."""
        out, error = process.communicate(timeout=60)
        return process.returncode, out + error

    def wait(self, what: Callable[[], Any], seconds: float = 30) -> None:
        """Until `what` is true."""
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.01)

    def alive(self) -> list[int]:
        """The processes of this lab's cells that are there (told by their environment)."""
        mark, found = f"RAN={self._ran}".encode(), []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment = (process / "environ").read_bytes().split(b"\0")
                if mark in environment and any(one.startswith(b"CORESIDENT_EVENTS=") for one in environment):
                    state = re.search(r"^State:\s+(\w)", (process / "status").read_text(), re.MULTILINE)
                    found += [int(process.name)] if state and state[1] not in "ZX" else []
        return found


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CORESIDENT_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    one = Lab(tmp_path)
    yield one
    for process in one.processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
