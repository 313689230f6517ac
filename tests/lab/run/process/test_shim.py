"""The shim, run as the lab runs it: what it gives a cell, what it reports, that nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from coresident.lab.run.process import shim

PYTHON = sys.executable


class Shimmed:
    """A shim with both of its pipes, and a mark by which all processes below it can be found."""

    def __init__(self, argv: list[str], grace: float, cpus: str, place: Path, env: Mapping[str, str]) -> None:
        self.mark = uuid.uuid4().hex
        self.place = place
        heard, self.control = os.pipe()
        self.status, told = os.pipe()
        with (place / "out").open("wb") as out, (place / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [PYTHON, "-I", "-S", shim.__file__, str(heard), str(told), str(grace), cpus, *argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**env, "MARK": self.mark},
                pass_fds=(heard, told),
                start_new_session=True,
                cwd=place,
            )
        os.close(heard)
        os.close(told)

    def ask(self, word: bytes) -> None:
        os.write(self.control, word)

    def report(self) -> dict[str, Any]:
        with os.fdopen(self.status, "rb") as file:
            text = file.read()
        assert self.process.wait(5) == 0, (self.place / "err").read_text()
        return dict(json.loads(text))

    def alive(self) -> list[int]:
        """Pids of running processes that carry the mark (the shim does too)."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return [pid for pid in found if (stat := shim.stat_of(pid)) is not None and stat[1] not in "ZX"]

    @property
    def out(self) -> str:
        return (self.place / "out").read_text()


Start = Callable[..., Shimmed]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Shimmed] = []

    def begin(*argv: str, grace: float = 0.3, cpus: str = "", env: Mapping[str, str] = os.environ) -> Shimmed:
        started.append(Shimmed(list(argv), grace, cpus, tmp_path, env))
        return started[-1]

    yield begin
    for each in started:
        os.close(each.control)
        each.process.wait(5)


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "cell.py"
    path.write_text(textwrap.dedent(text))
    return [PYTHON, "-I", "-S", str(path)]


def until(true: Callable[[], object], seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_reports_the_exit_code_and_the_time_by_the_monotonic_clock(start: Start) -> None:
    before = time.monotonic()
    report = start("sh", "-c", "sleep 0.2; exit 7").report()
    assert (report["exit"], report["signal"], report["ended_by"]) == (7, None, "itself")
    assert 0.2 <= report["ended"] - report["started"] < 1.5
    assert before <= report["started"] < report["ended"] <= time.monotonic()


def test_reports_the_signal_that_killed_the_command(start: Start) -> None:
    report = start("sh", "-c", "kill -SEGV $$").report()
    assert (report["exit"], report["signal"]) == (None, signal.SIGSEGV)


def test_cpu_time_and_memory_cover_grandchildren_even_orphaned_ones(start: Start, tmp_path: Path) -> None:
    report = start(
        *script(
            tmp_path,
            """
            import os, time
            if os.fork() == 0:
                if os.fork() == 0:                 # an orphan at once: only a subreaper can account for it
                    block = bytearray(64 << 20)
                    end = time.process_time() + 0.3
                    while time.process_time() < end: pass
                    open("finished", "w").close()
                os._exit(0)
            while not os.path.exists("finished"): time.sleep(0.01)
            """,
        )
    ).report()
    assert 0.3 <= report["cpu"] < 1.5
    assert report["maxrss"] > 64 << 20
    assert report["leftovers"] == 0


def test_the_cell_gets_no_pipe_of_the_lab_and_an_empty_standard_input(start: Start) -> None:
    shimmed = start("sh", "-c", "ls /proc/$$/fd; readlink /proc/$$/fd/0")
    assert shimmed.report()["exit"] == 0
    assert shimmed.out.split() == ["0", "1", "2", "/dev/null"]


def test_the_cell_gets_exactly_the_environment_it_was_given(start: Start) -> None:
    # In an empty locale an interpreter adds LC_CTYPE to its own environment: that must not reach the cell.
    shimmed = start("/usr/bin/env", env={"A": "1", "B": "x=y"})
    assert shimmed.report()["exit"] == 0
    assert set(shimmed.out.split()) == {"A=1", "B=x=y", f"MARK={shimmed.mark}"}


def test_the_cell_gets_default_signal_handling(start: Start) -> None:
    shimmed = start("grep", "-E", "Sig(Ign|Blk)", "/proc/self/status")
    assert shimmed.report()["exit"] == 0
    # 32 and 33 are the C library's own: Python cannot set them, and children of `make` inherit them ignored.
    settable = ~(1 << 31 | 1 << 32)
    assert [int(line.split()[1], 16) & settable for line in shimmed.out.splitlines()] == [0, 0]


def test_a_cell_that_signals_its_whole_group_does_not_hit_the_shim(start: Start) -> None:
    assert start("sh", "-c", "kill -KILL 0").report()["signal"] == signal.SIGKILL


def test_the_cell_is_pinned_before_it_starts(start: Start) -> None:
    core = max(os.sched_getaffinity(0))
    shimmed = start("grep", "Cpus_allowed_list", "/proc/self/status", cpus=str(core))
    assert shimmed.report()["exit"] == 0
    assert shimmed.out.split() == ["Cpus_allowed_list:", str(core)]


def test_cores_that_do_not_exist_are_a_reason_not_to_start(start: Start) -> None:
    report = start("true", cpus="4000").report()
    assert "cannot be pinned to cores [4000]" in report["problem"]
    assert report["exit"] is None


@pytest.mark.parametrize(
    ("content", "mode", "sentence"),
    [
        (None, 0, "there is no such file"),
        ("#!/bin/sh\n", 0o644, "permission denied"),
        ("#!/no/such/interpreter\n", 0o755, "the interpreter named in its first line does not exist"),
        ("no program\n", 0o755, "its first line names no interpreter"),
    ],
)
def test_a_command_that_cannot_be_executed_is_told_in_one_sentence(
    start: Start, tmp_path: Path, content: str | None, mode: int, sentence: str
) -> None:
    program = tmp_path / "prögram 😀"
    if content is not None:
        program.write_text(content)
        program.chmod(mode)
    report = start(str(program)).report()
    assert sentence in report["problem"]
    assert "pr" in report["problem"] and "ögram" in report["problem"]
    assert (report["exit"], report["signal"]) == (None, None)


def test_a_name_that_is_nowhere_on_the_path_is_told_so(start: Start) -> None:
    assert start("no-such-program-here").report()["problem"] == (
        "'no-such-program-here' cannot be executed: no directory of PATH has it"
    )


def test_terminate_lets_the_cell_clean_up_within_the_grace(start: Start) -> None:
    shimmed = start(
        "sh", "-c", "trap 'echo cleaned; exit 5' TERM; echo ready; while :; do sleep 0.01; done", grace=3
    )
    until(lambda: "ready" in shimmed.out)
    shimmed.ask(b"t")
    report = shimmed.report()
    assert (report["exit"], report["ended_by"]) == (5, "terminate")
    assert "cleaned" in shimmed.out


# Each goes into a session of its own, ignores SIGTERM, and is an orphan: only a kill finds and ends it.
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("ready", "w").close()
        time.sleep(60)
    os._exit(0)
os.wait()
"""


def test_terminate_kills_after_the_grace_what_ignores_it_in_another_session(
    start: Start, tmp_path: Path
) -> None:
    shimmed = start(*script(tmp_path, STUBBORN + "time.sleep(60)"))
    until((tmp_path / "ready").exists)
    asked = time.monotonic()
    shimmed.ask(b"t")
    report = shimmed.report()
    assert report["signal"] == signal.SIGKILL
    assert 0.3 <= time.monotonic() - asked < 10
    assert shimmed.alive() == []


def test_kill_does_not_wait_for_the_grace(start: Start, tmp_path: Path) -> None:
    shimmed = start(*script(tmp_path, STUBBORN + "time.sleep(60)"), grace=30)
    until((tmp_path / "ready").exists)
    shimmed.ask(b"t")
    time.sleep(0.1)
    shimmed.ask(b"k")
    assert shimmed.report()["signal"] == signal.SIGKILL
    assert shimmed.alive() == []


def test_the_end_of_the_control_pipe_is_the_death_of_the_lab(start: Start, tmp_path: Path) -> None:
    shimmed = start(*script(tmp_path, STUBBORN + "time.sleep(60)"))
    until((tmp_path / "ready").exists)
    os.close(shimmed.control)
    shimmed.control = os.open("/dev/null", os.O_RDONLY)
    assert shimmed.report()["ended_by"] == "lab"
    assert shimmed.alive() == []


def test_what_the_command_left_running_is_counted_and_ended(start: Start, tmp_path: Path) -> None:
    shimmed = start(*script(tmp_path, STUBBORN))
    report = shimmed.report()
    assert (report["exit"], report["leftovers"]) == (0, 1)
    assert shimmed.alive() == []


def test_what_ends_by_itself_right_after_the_command_is_not_left_over(start: Start) -> None:
    report = start("sh", "-c", "sleep 0.05 & exit 0").report()
    assert (report["exit"], report["leftovers"]) == (0, 0)


def test_a_stopped_process_can_still_follow_terminate(start: Start) -> None:
    shimmed = start("sh", "-c", "trap 'exit 3' TERM; echo ready; kill -STOP $$", grace=5)
    until(lambda: "ready" in shimmed.out)
    time.sleep(0.05)
    shimmed.ask(b"t")
    assert shimmed.report()["exit"] == 3


def test_a_tree_that_keeps_forking_cannot_escape_the_kill(start: Start, tmp_path: Path) -> None:
    # Four lines of processes, each the parent of its successor for a moment only: any single look at them is
    # out of date when it has been made.
    shimmed = start(
        *script(
            tmp_path,
            """
            import os, signal, time
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for _ in range(4):
                if os.fork() == 0:
                    os.setsid()
                    end = time.monotonic() + 20
                    while time.monotonic() < end:
                        if os.fork(): os._exit(0)
                    os._exit(0)
            open("ready", "w").close()
            time.sleep(60)
            """,
        )
    )
    until((tmp_path / "ready").exists)
    shimmed.ask(b"k")
    report = shimmed.report()
    assert (report["signal"], report["survivors"]) == (signal.SIGKILL, 0)
    time.sleep(0.1)
    assert shimmed.alive() == []


def test_a_sigterm_to_the_shim_ends_the_cell_and_is_told(start: Start, tmp_path: Path) -> None:
    shimmed = start(*script(tmp_path, STUBBORN + "time.sleep(60)"))
    until((tmp_path / "ready").exists)
    shimmed.process.terminate()
    assert shimmed.report()["ended_by"] == "signal"
    assert shimmed.alive() == []


def test_the_command_dies_with_a_killed_shim(start: Start) -> None:
    shimmed = start("sh", "-c", "echo ready; exec sleep 60")
    until(lambda: "ready" in shimmed.out)
    shimmed.process.kill()
    until(lambda: shimmed.alive() == [], 1)


def test_the_shim_imports_nothing_slow() -> None:
    # Its start is part of every cell's overhead: each of these would add a quarter to it.
    code = f"import sys; exec(open({shim.__file__!r}).read(), {{'__name__': 'shim'}}); print(*sys.modules)"
    loaded = subprocess.run([PYTHON, "-I", "-S", "-c", code], capture_output=True, check=True, text=True)
    assert "ctypes" in loaded.stdout
    assert not set(loaded.stdout.split()) & {
        "json",
        "re",
        "subprocess",
        "pathlib",
        "typing",
        "collections.abc",
    }
