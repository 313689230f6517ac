"""Supervising one command, for real: how its end is told, what ends it early, that nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coresident.errors import MachineError, UserError
from coresident.lab.run.process import oom, shim, strays, supervise
from coresident.lab.run.process.stop import StopFlag
from coresident.lab.run.process.supervise import Outcome

PYTHON = (sys.executable, "-I", "-S")


class Place:
    """A directory in which commands are supervised, and the processes that started in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, *argv: str, timeout: float = 10, grace: float = 0.3, **more: object) -> Outcome:
        given = {
            "env": dict(os.environ),
            "cwd": self.path,
            "stdout": self.path / "stdout",
            "stderr": self.path / "stderr",
            "tick": 0.02,
            **more,
        }
        return supervise.supervise(argv, timeout=timeout, grace=grace, **given)  # type: ignore[arg-type]

    def script(self, text: str) -> tuple[str, ...]:
        (self.path / "cell.py").write_text(textwrap.dedent(text))
        return (*PYTHON, "cell.py")

    def alive(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                if path.readlink() == self.path:
                    found.append(int(path.parent.name))
        return [pid for pid in found if (stat := shim.stat_of(pid)) is not None and stat[1] not in "ZX"]

    def zombies(self) -> list[int]:
        mine = os.getpid()
        return [pid for pid, stat in shim.snapshot().items() if stat[0] == mine and stat[1] == "Z"]

    def read(self, name: str) -> str:
        path = self.path / name
        return path.read_text() if path.exists() else ""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    path = tmp_path / "place"
    path.mkdir()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    yield Place(path)
    assert Place(path).alive() == []
    assert Place(path).zombies() == []
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors + 1, (
        "a descriptor was leaked"
    )  # a flag's, at most


def test_an_exit_code_is_told_with_wall_and_cpu_time(place: Place) -> None:
    outcome = place.run("sh", "-c", "echo out; echo err >&2; sleep 0.2; exit 3")
    assert (outcome.exit_code, outcome.signal, outcome.lost, outcome.problem) == (3, None, False, "")
    assert not outcome.timed_out and not outcome.interrupted
    assert outcome.wall == pytest.approx(outcome.ended - outcome.started)
    assert 0.2 <= outcome.wall < 1
    assert 0 < outcome.cpu < 0.2
    assert (place.read("stdout"), place.read("stderr")) == ("out\n", "err\n")


def test_a_signal_is_told(place: Place) -> None:
    outcome = place.run("sh", "-c", "kill -ABRT $$")
    assert (outcome.exit_code, outcome.signal) == (None, signal.SIGABRT)


def test_output_and_errors_may_share_one_file_and_are_appended(place: Place) -> None:
    log = place.path / "log"
    log.write_text("before\n")
    place.run("sh", "-c", "echo one; echo two >&2; echo three", stdout=log, stderr=log)
    assert log.read_text() == "before\none\ntwo\nthree\n"


def test_a_grandchild_that_keeps_the_output_open_does_not_keep_us_waiting(place: Place) -> None:
    began = time.monotonic()
    outcome = place.run("sh", "-c", "setsid sleep 60 & exit 0")
    assert (outcome.exit_code, outcome.leftovers) == (0, 1)
    assert time.monotonic() - began < 20


def test_the_cell_is_pinned(place: Place) -> None:
    core = min(os.sched_getaffinity(0))
    place.run("grep", "Cpus_allowed_list", "/proc/self/status", cpus={core})
    assert place.read("stdout").split()[1] == str(core)


def test_a_timeout_is_term_grace_kill_of_everything_below(place: Place) -> None:
    command = place.script("""
        import os, signal, time
        signal.signal(signal.SIGTERM, lambda *_: open("asked", "w").close())
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: time.sleep(1)
    """)
    outcome = place.run(*command, timeout=0.5, grace=0.3)
    assert (outcome.timed_out, outcome.interrupted, outcome.signal) == (True, False, signal.SIGKILL)
    assert (place.path / "asked").exists()
    # The clock of the timeout began with the shim, a moment before the cell.
    assert 0.7 <= outcome.wall < 1.8
    assert outcome.asked_to_end is not None and 0.4 <= outcome.asked_to_end - outcome.started < 0.8


def test_an_end_by_itself_is_no_timeout_however_close(place: Place) -> None:
    # The command has ended; what it left behind takes until after the timeout to be ended.
    outcome = place.run("sh", "-c", "trap '' TERM; setsid sleep 60 & exit 0", timeout=0.15, grace=0.3)
    assert (outcome.timed_out, outcome.exit_code, outcome.leftovers) == (False, 0, 1)
    assert outcome.asked_to_end is None


def test_stopping_now_interrupts_the_cell_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "LOOK", 60.0)  # nothing else wakes it
    stop = StopFlag()

    def ask() -> None:
        stop.now = True

    threading.Timer(0.3, ask).start()
    began = time.monotonic()
    outcome = place.run("sleep", "60", stop=stop, tick=30)
    assert (outcome.interrupted, outcome.timed_out, outcome.signal) == (True, False, signal.SIGTERM)
    assert time.monotonic() - began < 20


def test_finishing_lets_the_running_cell_end(place: Place) -> None:
    stop = StopFlag()
    stop.finish = True
    outcome = place.run("sh", "-c", "sleep 0.1; exit 4", stop=stop)
    assert (outcome.interrupted, outcome.exit_code) == (False, 4)


def test_nothing_is_started_when_stopping_was_asked_before(place: Place) -> None:
    stop = StopFlag()
    stop.now = True
    assert place.run("touch", "started", stop=stop).interrupted
    assert not (place.path / "started").exists()


def test_ticks_come_with_the_pid_of_the_shim(place: Place) -> None:
    seen: list[int] = []

    def tick(pid: int) -> None:
        seen.append(pid)
        assert shim.stat_of(pid) is not None

    place.run("sleep", "0.5", tick=0.05, on_tick=tick)
    assert len(set(seen)) == 1
    assert 5 <= len(seen) <= 14


def test_what_a_tick_raises_ends_the_cell_and_is_passed_on(place: Place) -> None:
    ticks = iter(range(3))

    def tick(_: int) -> None:
        next(ticks)

    began = time.monotonic()
    with pytest.raises(StopIteration):
        place.run("sh", "-c", "trap '' TERM; setsid sleep 60; sleep 60", on_tick=tick, grace=30)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("where", ["stdout", "stderr"])
def test_a_flood_of_output_ends_the_cell_with_the_reason(place: Place, where: str) -> None:
    outcome = place.run("sh", "-c", "yes" if where == "stdout" else "yes >&2", log_limit=2**20)
    assert outcome.problem == "its output exceeded 1 MiB and it was ended"
    assert (outcome.timed_out, outcome.interrupted) == (False, False)
    assert (place.path / where).stat().st_size == 2**20


def test_a_command_that_does_not_exist_is_a_problem_and_no_exit_code(place: Place) -> None:
    outcome = place.run("no-such-command")
    assert outcome.problem == "'no-such-command' cannot be executed: no directory of PATH has it"
    assert (outcome.exit_code, outcome.signal) == (None, None)


def test_too_long_a_command_line_is_a_problem(place: Place) -> None:
    outcome = place.run("true", *["x" * 100_000] * 100)
    assert outcome.problem.startswith("the command cannot be started")


def test_a_missing_directory_is_the_users_error(place: Place) -> None:
    with pytest.raises(UserError, match=r"working directory .* does not exist"):
        place.run("true", cwd=place.path / "nowhere")


def test_unwritable_output_is_the_machines_error(place: Place) -> None:
    with pytest.raises(MachineError, match=r"cannot be written to .*stdout"):
        place.run("true", stdout=place.path / "nowhere" / "stdout")


def ticking_kill(place: Place, number: int) -> Callable[[int], None]:
    """A tick that signals the shim once the cell says that it is ready."""
    sent: list[int] = []

    def tick(pid: int) -> None:
        if not sent and (place.path / "ready").exists():
            sent.append(pid)
            os.kill(pid, number)

    return tick


SPREAD = """
    import os, signal, subprocess, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(60)          # an orphan in a session of its own
        os._exit(0)
    os.wait()
    subprocess.Popen(["env", "-i", "setsid", "sleep", "60"])    # has dropped its environment, too
    time.sleep(0.1)
    open("ready", "w").close()
    time.sleep(60)
"""


def test_a_killed_shim_is_lost_and_takes_all_below_it_along(place: Place) -> None:
    kill = ticking_kill(place, signal.SIGKILL)
    bystanders: list[subprocess.Popen[bytes]] = []

    def tick(pid: int) -> None:
        # What the lab itself starts meanwhile stays untouched, in whatever session.
        if not bystanders:
            bystanders.append(subprocess.Popen(["sleep", "60"], start_new_session=True))
        kill(pid)

    try:
        outcome = place.run(*place.script(SPREAD), on_tick=tick)
        assert outcome.lost
        assert (outcome.exit_code, outcome.signal, outcome.timed_out) == (None, None, False)
        assert place.alive() == []
        assert bystanders[0].poll() is None
    finally:
        bystanders[0].kill()
        bystanders[0].wait()


def test_children_born_just_before_the_shim_was_killed_are_found_too(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No look after the first.
    monkeypatch.setattr(supervise, "LOOK", 60.0)
    bystanders: list[subprocess.Popen[bytes]] = []

    def tick(pid: int) -> None:
        # What the lab itself has started since then is known by its session.
        if not bystanders and (place.path / "ready").exists():
            bystanders.append(subprocess.Popen(["sleep", "60"]))
            os.kill(pid, signal.SIGKILL)

    try:
        assert place.run(*place.script(SPREAD), on_tick=tick).lost
        assert place.alive() == []
        assert bystanders[0].poll() is None
    finally:
        bystanders[0].kill()
        bystanders[0].wait()


def test_a_shim_that_does_not_answer_is_killed_with_all_below_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "SLACK", 0.3)
    outcome = place.run(
        *place.script(SPREAD), on_tick=ticking_kill(place, signal.SIGSTOP), timeout=0.6, grace=0.1
    )
    assert (outcome.lost, outcome.timed_out) == (True, True)


def test_the_lab_adopts_orphans_only_while_a_cell_runs(place: Place) -> None:
    def adopts() -> bool:
        probe = (
            "import os, time\nif os.fork() == 0:\n"
            " time.sleep(0.1); print(os.getpid(), os.getppid(), flush=True)\n"
        )
        child = subprocess.Popen([*PYTHON, "-c", probe], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        orphan, parent = map(int, child.stdout.read().split())
        child.wait()
        child.stdout.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(orphan, 0)
        return parent == os.getpid()

    assert not adopts()
    seen: list[bool] = []
    place.run("sleep", "0.6", on_tick=lambda _: seen.append(adopts()) if not seen else None)
    assert seen == [True]
    assert not adopts()


def test_two_cells_at_once_do_not_touch_each_other(place: Place, tmp_path: Path) -> None:
    other = Place(tmp_path / "other")
    other.path.mkdir()
    outcomes: list[Outcome] = []
    thread = threading.Thread(
        target=lambda: outcomes.append(other.run("sh", "-c", "setsid sleep 1.2; exit 6"))
    )
    thread.start()
    assert place.run(*place.script(SPREAD), on_tick=ticking_kill(place, signal.SIGKILL)).lost
    thread.join()
    assert (outcomes[0].exit_code, outcomes[0].lost) == (6, False)
    assert not strays.SHIMS


def test_the_overhead_of_a_cell_is_small(place: Place) -> None:
    def seconds() -> float:
        began = time.monotonic()
        assert place.run("true").exit_code == 0
        return time.monotonic() - began

    assert sorted(seconds() for _ in range(5))[2] < 0.15


MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory cgroup of 48 MiB, below our own."""
    own = next((c for c in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in c), None)
    if own is None:
        pytest.skip("no memory controller of cgroup version 1 here")
    group = Path(f"{MEMORY}{own.split(':')[2]}/coresident-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(48 << 20))
    except OSError:
        pytest.skip("cgroups cannot be made here")
    yield group
    group.rmdir()


def test_a_kill_for_want_of_memory_is_counted(place: Place, limited: Path) -> None:
    lab = f"""
import os, sys
open("{limited}/cgroup.procs", "w").write(str(os.getpid()))
from coresident.lab.run.process.supervise import supervise
from pathlib import Path
hog = "block = bytearray(200 << 20)"
outcome = supervise(["{sys.executable}", "-c", hog], env=dict(os.environ), cwd=".", stdout=Path("o"),
                    stderr=Path("e"), timeout=10, grace=1)
print(outcome.signal, outcome.oom_kills)
"""
    done = subprocess.run(
        [sys.executable, "-c", lab], cwd=place.path, capture_output=True, text=True, timeout=20
    )
    assert done.stdout.split() == ["9", "1"], done.stderr


def test_the_kernels_counter_of_kills_can_be_read_here() -> None:
    assert oom.kills() is not None
