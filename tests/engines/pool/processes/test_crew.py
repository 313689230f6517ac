"""Nobody waits for a process that is gone: it is named, with how it ended, and the others are ended too."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coresident.engines.pool.processes.channel import pair
from coresident.engines.pool.processes.crew import Casualty, Crew, Patience, ending

SHORT = Patience(floor=1.0, factor=1.0)

# A member that does what its arguments say, one after another.
MEMBER = """
import os, signal, sys, time
from coresident.engines.pool.processes.channel import Channel
channel = Channel.inherited(int(sys.argv[1]))
channel.tell("alive", pid=os.getpid())
for act in sys.argv[2:]:
    word, _, value = act.partition("=")
    if word == "say": channel.tell(value)
    elif word == "hear": assert channel.hear()["event"] == value
    elif word == "fail": channel.tell("failed", status="nonfinite", reason=value)
    elif word == "sleep": time.sleep(float(value))
    elif word == "kill": os.kill(os.getpid(), getattr(signal, value))
    elif word == "exit": os._exit(int(value))
    elif word == "steps":
        for step in range(int(value)):
            channel.tell("step", step=step)
            time.sleep(0.05)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "acting_member.py").write_text(MEMBER)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


@contextlib.contextmanager
def crew_of(environment: dict[str, str], *acts: str, patience: Patience = SHORT) -> Iterator[Crew]:
    """A crew with one member "0", "1", ... for each list of acts."""
    with Crew(environment, patience) as crew:
        for number, words in enumerate(acts):
            ours, theirs = pair()
            arguments = [str(theirs.fileno()), *words.split()]
            crew.start(str(number), "acting_member", arguments, ours, (theirs.fileno(),))
            theirs.close()
        crew.expect(list(crew.members), "alive")
        yield crew


def test_all_are_waited_for_whatever_the_order(environment: dict[str, str]) -> None:
    with crew_of(
        environment, "sleep=0.2 say=loaded hear=go say=learned", "say=loaded hear=go say=learned"
    ) as crew:
        assert set(crew.expect(["0", "1"], "loaded")) == {"0", "1"}
        crew.tell(["0", "1"], "go")
        crew.expect(["0", "1"], "learned")
        crew.expect_exit(["0", "1"])


def test_what_is_watched_meanwhile_can_end_the_wait(environment: dict[str, str]) -> None:
    looks, before = [], psutil.Process().children()

    def watch() -> None:
        looks.append(time.monotonic())
        if len(looks) > 10:
            raise MemoryError("too much")

    with pytest.raises(MemoryError, match="too much"), Crew(environment, SHORT, watch) as crew:
        ours, theirs = pair()
        with theirs:
            crew.start("0", "acting_member", [str(theirs.fileno()), "sleep=60"], ours, (theirs.fileno(),))
        crew.expect(["0"], "learned")
    assert looks[-1] - looks[0] < 5
    # Others' may be there, such as what watches over shared memory.
    assert psutil.Process().children() == before


def test_words_that_come_early_are_kept(environment: dict[str, str]) -> None:
    with crew_of(environment, "say=loaded say=barrier sleep=9") as crew:
        time.sleep(0.1)
        heard = [crew.expect(["0"], word)["0"]["event"] for word in ("loaded", "barrier")]
    assert heard == ["loaded", "barrier"]


@pytest.mark.parametrize(
    ("act", "status", "said"),
    [
        ("kill=SIGKILL", "failed", "1: it was killed by SIGKILL"),
        ("kill=SIGSEGV", "failed", "1: it was killed by SIGSEGV"),
        ("exit=0", "failed", "1: it ended with status 0 before it was done"),
        ("exit=3", "failed", "1: it ended with status 3 before it was done"),
        ("exit=77", "failed", "1: it wrote into the shared base"),
        ("fail=nan sleep=9", "nonfinite", "1: nan"),
    ],
)
def test_a_member_that_is_lost_is_named_and_its_siblings_are_ended(
    environment: dict[str, str], act: str, status: str, said: str
) -> None:
    with (
        pytest.raises(Casualty) as caught,
        crew_of(environment, "say=barrier sleep=60", f"sleep=0.1 {act}", "sleep=60") as crew,
    ):
        processes = [psutil.Process(member.pid) for member in crew.members.values()]
        start = time.monotonic()
        crew.expect(["0", "1", "2"], "barrier")
    assert str(caught.value) == said
    assert caught.value.status == status
    assert time.monotonic() - start < 30
    assert not any(process.is_running() for process in processes)


def test_a_member_that_hangs_while_a_sibling_waits_is_named(environment: dict[str, str]) -> None:
    with (
        pytest.raises(Casualty, match=r"^1: no sign of life for \d+ s while its siblings waited \('barrier'"),
        crew_of(environment, "say=barrier sleep=60", "sleep=60") as crew,
    ):
        crew.expect(["0", "1"], "barrier")


def test_a_stopped_member_is_ended_all_the_same(environment: dict[str, str]) -> None:
    with (
        pytest.raises(Casualty, match=r"^1: no sign of life"),
        crew_of(environment, "say=barrier sleep=60", "sleep=60") as crew,
    ):
        stopped = psutil.Process(crew.members["1"].pid)
        stopped.send_signal(signal.SIGSTOP)
        crew.expect(["0", "1"], "barrier")
    assert not stopped.is_running()


def test_one_who_left_early_is_not_waited_for(environment: dict[str, str]) -> None:
    with (
        pytest.raises(Casualty, match=r"^0: it ended before it said 'checked'"),
        crew_of(environment, "say=learned") as crew,
    ):
        crew.expect(["0"], "learned")
        crew.expect(["0"], "checked")


def test_one_who_is_slow_but_alive_is_waited_for(environment: dict[str, str]) -> None:
    patient = Patience(0.5, 1.0)
    with crew_of(environment, "say=learned", "steps=30 say=learned", patience=patient) as crew:
        crew.expect(["0", "1"], "learned")


def test_a_servant_that_dies_is_noticed_while_others_are_waited_for(environment: dict[str, str]) -> None:
    with (
        pytest.raises(Casualty, match=r"^1: it was killed by SIGKILL"),
        crew_of(environment, "sleep=60", "sleep=0.1 kill=SIGKILL") as crew,
    ):
        crew.expect(["0"], "loaded")


def test_servants_leave_when_told_and_one_who_does_not_is_named(environment: dict[str, str]) -> None:
    with crew_of(environment, "hear=leave") as crew, ending(crew, ["0"]):
        pass
    with (
        pytest.raises(Casualty, match=r"^0: no sign of life"),
        crew_of(environment, "hear=leave sleep=60") as crew,
        ending(crew, ["0"]),
    ):
        pass


def test_one_who_failed_can_be_gone_on_without_and_nothing_that_others_said_is_lost(
    environment: dict[str, str],
) -> None:
    with crew_of(environment, "say=learned", "sleep=0.3 exit=3", "sleep=0.6 say=learned") as crew:
        with pytest.raises(Casualty, match=r"^1: it ended with status 3"):
            crew.expect(["0", "1", "2"], "learned")
        crew.dismiss("1")
        assert set(crew.expect(["0", "2"], "learned")) == {"0", "2"}
        crew.expect_exit(["0", "2"])


def test_one_who_hangs_is_ended_by_going_on_without_it(environment: dict[str, str]) -> None:
    with crew_of(environment, "say=learned", "sleep=60") as crew:
        hanging = psutil.Process(crew.members["1"].pid)
        crew.dismiss("1")
        crew.expect(["0"], "learned")
        assert hanging.wait(timeout=5) is not None or not hanging.is_running()
