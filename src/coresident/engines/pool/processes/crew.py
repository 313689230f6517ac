"""The processes of one pool, seen from the driver: started, heard, told, and never left waiting for one that
is gone.

A member that dies, raises, or falls silent while its siblings are through is a `Casualty`, which names it.
Leaving the `Crew` ends every member that is still there.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coresident.engines.pool.processes.channel import Channel, Closed
from coresident.engines.pool.sharing import fault

# How often `watch` is called while the crew is waited for.
WATCH_SECONDS = 0.02
# How long a process that hung up may take to be reaped.
REAP_SECONDS = 30.0


class Casualty(Exception):  # noqa: N818 - what became of a member
    """A member failed: which one, with which status of a cell, and why; `remedy` is the end of the reason, if it says one."""

    def __init__(self, member: str, status: str, reason: str, remedy: str = "") -> None:
        super().__init__(f"{member}: {reason}")
        self.member, self.status, self.reason, self.remedy = member, status, reason, remedy


@dataclass(frozen=True)
class Patience:
    """How long a member may be silent once a sibling is through: `factor` times what the sibling took, at
    least `floor` s.

    While nobody is through there is no limit here: a slow disk is slow for all, and the cell's own timeout
    covers that.
    """

    floor: float = 60.0
    factor: float = 10.0


@dataclass
class Member:
    """One process. `process` is None for one that the zygote forked, which then tells its exit status."""

    name: str
    channel: Channel
    process: subprocess.Popen[bytes] | None = None
    pid: int | None = None
    heard: deque[Mapping[str, Any]] = field(default_factory=deque)
    last_heard: float = 0.0
    hung_up: float | None = None
    judged: bool = False
    leaving: bool = False
    exit_code: int | None = None


class Crew:
    """All members, by name. `watch` is called again and again while they are waited for, and may raise."""

    def __init__(
        self, environment: Mapping[str, str], patience: Patience, watch: Callable[[], None] | None = None
    ) -> None:
        self._environment = dict(environment)
        self._watch = watch
        self._patience = patience
        self._selector = selectors.DefaultSelector()
        self.members: dict[str, Member] = {}
        self._oom_kills = oom_kills()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members.values():
            if (
                member.exit_code is None
                and member.pid is not None
                and (member.process is not None or member.hung_up is None)
            ):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
        for member in self.members.values():
            member.channel.close()
            if member.process is not None:
                member.process.wait()
        self._selector.close()

    def start(
        self, name: str, module: str, arguments: Iterable[str], channel: Channel, fds: Iterable[int]
    ) -> Member:
        """Start `python -m MODULE ARGUMENTS`, which inherits the descriptors `fds`, and talk to it over
        `channel`.
        """
        argv = [sys.executable, "-m", module, *arguments]
        process = subprocess.Popen(
            argv,
            env=self._environment,
            pass_fds=tuple(fds),
            stdin=subprocess.DEVNULL,
            # An interrupt from the terminal is the driver's to pass on.
            process_group=0,
        )
        member = self.adopt(name, channel)
        member.process, member.pid = process, process.pid
        return member

    def adopt(self, name: str, channel: Channel) -> Member:
        """Count a process that somebody else starts among the members."""
        member = Member(name, channel, last_heard=time.monotonic())
        self.members[name] = member
        self._selector.register(channel, selectors.EVENT_READ, member)
        return member

    def tell(self, names: Iterable[str], order: str, **values: Any) -> None:
        """Send an order. One who can no longer hear it is noticed by the next `expect`."""
        for name in names:
            with contextlib.suppress(Closed):
                self.members[name].channel.tell(order, **values)

    def expect(self, names: Iterable[str], event: str) -> dict[str, Mapping[str, Any]]:
        """Wait until each of `names` has sent `event` and return those messages; other messages are signs of
        life.

        Raises `Casualty` for any member that fails meanwhile, or stays silent beyond patience.
        """
        found: dict[str, Mapping[str, Any]] = {}
        try:
            self._gather(list(names), event, found)
        except Casualty:
            # Whoever goes on without that member asks again.
            for name, message in found.items():
                self.members[name].heard.appendleft(message)
            raise
        return found

    def dismiss(self, name: str) -> None:
        """Go on without a member that failed: end it, and hear and judge it no more."""
        member = self.members[name]
        member.judged = True
        if member.hung_up is None:
            self._selector.unregister(member.channel)
            if member.pid is not None and member.exit_code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
            member.hung_up = time.monotonic()

    def _gather(self, names: list[str], event: str, found: dict[str, Mapping[str, Any]]) -> None:
        start = time.monotonic()
        first: float | None = None
        while True:
            for name in names:
                if name not in found and (message := self._find(self.members[name], event)) is not None:
                    found[name] = message
                    first = first if first is not None else time.monotonic() - start
                elif name not in found and self.members[name].judged:
                    raise Casualty(name, "failed", f"it ended before it said {event!r}")
            if len(found) == len(names):
                return
            if first is not None:
                limit = max(self._patience.floor, self._patience.factor * first)
                self._check_silence([name for name in names if name not in found], event, start, limit)
            self._listen(1.0)

    def expect_exit(self, names: Iterable[str]) -> None:
        """Wait until each of `names` has ended well. A member that hangs in its exit is a `Casualty` too."""
        start = time.monotonic()
        waiting = set(names)
        for name in waiting:
            self.members[name].leaving = True
        while waiting := {name for name in waiting if not self.members[name].judged}:
            self._check_silence(sorted(waiting), "exit", start, self._patience.floor)
            self._listen(0.05)

    def _check_silence(self, names: Iterable[str], event: str, start: float, limit: float) -> None:
        for name in names:
            silent = time.monotonic() - max(start, self.members[name].last_heard)
            if silent > limit:
                raise Casualty(
                    name,
                    "failed",
                    f"no sign of life for {silent:.0f} s while its siblings waited ({event!r} did not come)",
                )

    def _find(self, member: Member, event: str) -> Mapping[str, Any] | None:
        for message in member.heard:
            if message["event"] == event:
                member.heard.remove(message)
                return message
        return None

    def _listen(self, seconds: float) -> None:
        """Hear whoever speaks within `seconds`, then see what became of those who hung up."""
        gone = [
            member for member in self.members.values() if member.hung_up is not None and not member.judged
        ]
        if self._watch is not None:
            self._watch()
            seconds = min(seconds, WATCH_SECONDS)
        for key, _ in self._selector.select(min(seconds, 0.01) if gone else seconds):
            member: Member = key.data
            try:
                messages = member.channel.pending()
            except Closed:
                self._selector.unregister(member.channel)
                member.hung_up = time.monotonic()
                gone.append(member)
                continue
            member.last_heard = time.monotonic()
            for message in messages:
                self._note(member, message)
        for member in gone:
            self._judge(member, time.monotonic())

    def _note(self, member: Member, message: Mapping[str, Any]) -> None:
        if message["event"] == "failed":
            # A process that trains several learners says which of them it was.
            name = str(message.get("member", member.name))
            remedy = str(message.get("remedy", ""))
            raise Casualty(name, str(message["status"]), str(message["reason"]), remedy)
        if message["event"] == "exited":
            self.members[message["member"]].exit_code = int(message["code"])
        elif message["event"] == "alive":
            member.pid = int(message["pid"])
            member.heard.append(message)
        elif message["event"] != "step":
            # From its last word on, a learner may go.
            member.leaving = member.leaving or message["event"] == "learned"
            member.heard.append(message)

    def _judge(self, member: Member, now: float) -> None:
        """Decide on a member that hung up, as soon as whoever reaps it says how it ended."""
        assert member.hung_up is not None
        code = self._exit_code(member.name)
        if code is None and now < member.hung_up + REAP_SECONDS:
            return
        member.judged = True
        if not (member.leaving and code == 0):
            raise Casualty(member.name, *self._how(code))

    def _exit_code(self, name: str) -> int | None:
        member = self.members[name]
        if member.exit_code is None and member.process is not None:
            member.exit_code = member.process.poll()
        return member.exit_code

    def _how(self, code: int | None) -> tuple[str, str]:
        if code is None:
            return "failed", "it hung up and did not end"
        if code == fault.EXIT:
            return "failed", "it wrote into the shared base"
        if code >= 0:
            return "failed", f"it ended with status {code} before it was done"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        if -code == signal.SIGKILL and oom_kills() > self._oom_kills:
            return "oom", "it was killed by the kernel because memory ran out"
        return "failed", f"it was killed by {name}"


def oom_kills() -> int:
    """How many processes the kernel has killed on this machine because memory ran out."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


@contextlib.contextmanager
def ending(crew: Crew, names: Iterable[str]) -> Iterator[None]:
    """Members that serve the others: when the block is over they are told to leave, and must end well."""
    yield
    names = list(names)
    for name in names:
        crew.members[name].leaving = True
    crew.tell(names, "leave")
    crew.expect_exit(names)
