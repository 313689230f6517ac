"""Stopping a run by real signals to a real process: once after the cell, twice or by SIGTERM now."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LAB = """
import os, signal, sys
from pathlib import Path
from coresident.lab.run.process.stop import Stop
from coresident.lab.run.process.supervise import supervise
before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
with Stop(lambda line: print("say:", line, flush=True)) as stop:
    for cell in range(3):
        command = ["sh", "-c", "touch ready; " + sys.argv[1]]
        outcome = supervise(command, env=dict(os.environ), cwd=".", stdout=Path("o"),
                            stderr=Path("e"), timeout=40, grace=1, tick=5, stop=stop)
        print("cell", cell, "exit", outcome.exit_code, "interrupted", outcome.interrupted, flush=True)
        if stop.finish:
            break
print("restored", before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)])
"""


class Lab:
    def __init__(self, place: Path, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAB, script],
            cwd=place,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.place = place
        deadline = time.monotonic() + 30
        while not (place / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def signal(self, number: int) -> str:
        """What it says to a signal: on a busy machine that takes its time."""
        self.process.send_signal(number)
        return self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip()

    def lines(self) -> list[str]:
        return self.process.communicate(timeout=30)[0].splitlines()


@pytest.fixture
def lab(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A lab that runs three cells, each of which would take long (or runs the shell line that the test gives).

    The shell is replaced by what it runs: else it could go on to its next word before it is ended itself.
    """
    running = Lab(tmp_path, getattr(request, "param", "exec sleep 30"))
    yield running
    running.process.kill()
    running.process.wait()


@pytest.mark.parametrize("lab", ["until [ -e go ]; do sleep 0.05; done; exit 5"], indirect=True)
def test_ctrl_c_once_finishes_the_running_cell_and_then_stops(lab: Lab) -> None:
    said = lab.signal(signal.SIGINT)
    assert said == "say: stopping after the cell that is running (Ctrl-C again: stop it now)"
    (lab.place / "go").touch()
    assert lab.lines() == [
        "cell 0 exit 5 interrupted False",
        "restored True",
    ]


def test_ctrl_c_twice_interrupts_the_running_cell(lab: Lab) -> None:
    assert lab.signal(signal.SIGINT).startswith("say: stopping after")
    assert (
        lab.signal(signal.SIGINT)
        == "say: stopping now: the running cell is ended and recorded as interrupted (SIGINT)"
    )
    assert lab.lines() == ["cell 0 exit None interrupted True", "restored True"]


# It outlasts the first signal until its grace is over, so that the second surely finds the lab at it.
@pytest.mark.parametrize("lab", ["trap '' TERM; exec sleep 30"], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_a_closed_terminal_interrupt_the_running_cell(lab: Lab, number: signal.Signals) -> None:
    said = f"say: stopping now: the running cell is ended and recorded as interrupted ({number.name})"
    assert lab.signal(number) == said
    lab.process.send_signal(number)
    assert lab.lines() == ["cell 0 exit None interrupted True", "restored True"]


def in_child(code: Callable[[], None]) -> int:
    """Run `code` in a fork of its own, where signal handling may be changed at will; its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            code()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    from coresident.lab.run.process.stop import Stop

    def code() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
        with Stop(lambda _: None) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.now and not stop.finish

    assert in_child(code) == 0


def test_handlers_are_restored_when_the_run_ends_by_an_error() -> None:
    from coresident.lab.run.process.stop import Stop

    def code() -> None:
        before = signal.getsignal(signal.SIGTERM)
        try:
            with Stop(lambda _: None):
                raise ValueError
        except ValueError:
            assert signal.getsignal(signal.SIGTERM) is before

    assert in_child(code) == 0


def test_a_signal_in_the_middle_of_a_print_is_still_told(capfd: pytest.CaptureFixture[str]) -> None:
    from coresident.lab.run.process.stop import Stop

    def say(line: str) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter>")

    def code() -> None:
        with Stop(say) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.now

    assert in_child(code) == 0
    assert "stopping now" in capfd.readouterr().err
