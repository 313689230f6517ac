"""The small process between the lab and a cell: nothing of a cell outlives it, even when the lab is killed.

Run by `supervise` as `python -I -S shim.py CONTROL STATUS GRACE CPUS COMMAND...` in a session of its own. It
adopts every orphan below it (PR_SET_CHILD_SUBREAPER), so that "below the shim" is the whole cell, whatever
sessions, double forks or ignored signals are in it. CONTROL is a pipe from the lab: `t` ends the cell (TERM,
grace, KILL), `k` kills it at once, end of file means that the lab has died and is treated as `t`. STATUS gets
one JSON line when nothing is left below.

Standalone, and imports little: it starts once for every cell measured, and its start is part of the lab's
overhead.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37

# Seconds. What ends by itself so soon after its parent (a resource tracker, say) is not left over.
SETTLE = 0.2
# Between TERM and KILL for what the direct child left running.
LEFTOVER_GRACE = 1.0
# After which a process that SIGKILL does not end is given up as stuck in the kernel.
UNKILLABLE = 10.0
PAUSE = 0.005


def prctl(option: int, value: int) -> None:
    """Linux prctl(2) with one argument. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def stat_of(pid: int) -> tuple[int, str, int, int] | None:
    """(parent, state letter, session, start in clock ticks) of a process; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - pathlib would double the shim's start
            text = file.read()
    except OSError:
        return None
    # The name in parentheses may itself hold spaces and parentheses: fields count from the last one.
    fields = text[text.rindex(b")") + 2 :].split()
    return int(fields[1]), fields[0].decode(), int(fields[3]), int(fields[19])


def snapshot() -> dict[int, tuple[int, str, int, int]]:
    """`stat_of` every process."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            stat = stat_of(int(name))
            if stat is not None:
                found[int(name)] = stat
    return found


def below(tops: set[int], processes: dict[int, tuple[int, str, int, int]]) -> set[int]:
    """All descendants of `tops` in a snapshot, without `tops` themselves; zombies count."""
    children: dict[int, list[int]] = {}
    for pid, stat in processes.items():
        children.setdefault(stat[0], []).append(pid)
    found: set[int] = set()
    waiting = list(tops)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found and child not in tops:
                found.add(child)
                waiting.append(child)
    return found


def alive_below(tops: set[int]) -> set[int]:
    """Descendants of `tops` that still run (no zombies)."""
    processes = snapshot()
    return {pid for pid in below(tops, processes) if processes[pid][1] not in "ZX"}


def send(pids: set[int], number: int) -> None:
    """A signal to each; those that are gone meanwhile are passed over."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def terminate(pids: set[int]) -> None:
    """SIGTERM, and SIGCONT so that a stopped process can follow it."""
    send(pids, signal.SIGTERM)
    send(pids, signal.SIGCONT)


def freeze_and_kill(find: Callable[[], set[int]]) -> None:
    """SIGKILL all that `find()` returns, even while it forks.

    Everything is stopped first, and looked for again until a look finds nothing that was not already stopped
    before it: a stopped process cannot fork, so that none is born between the last look and the kill.
    """
    stopped: set[int] = set()
    for _ in range(200):
        found = find()
        new = found - stopped
        if not new:
            # A stop is taken at a process's next step: a fork already under way can still end after it.
            states = [stat_of(pid) for pid in found]
            if all(stat is None or stat[1] in "TtZXD" for stat in states) and find() <= stopped:
                break
            time.sleep(0.001)
        send(new, signal.SIGSTOP)
        stopped |= new
    send(find() | stopped, signal.SIGKILL)


class Shim:
    """One cell's life: start it, wait, end what is left, report."""

    def __init__(self, control: int, status: int, grace: float, cpus: set[int], argv: list[bytes]) -> None:
        self.control, self.status, self.grace, self.cpus, self.argv = control, status, grace, cpus, argv
        self.child = 0
        self.wait_status: int | None = None
        self.ended = 0.0
        # Who ended the direct child: "itself" or, asked while it ran, "terminate" and "kill" (the lab), "lab"
        # (the lab's death), "signal" (SIGTERM to the shim).
        self.ended_by = "itself"
        self.asked = ""
        self.term_at: float | None = None
        self.kill_now = False
        self.leftovers = 0
        self.survivors = 0

    def run(self) -> None:
        # Set before the fork, so that nothing can be born that we do not adopt.
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self.wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._ask("signal"))
        self.poll = select.poll()
        self.poll.register(self.control, select.POLLIN)
        self.poll.register(self.wake_read, select.POLLIN)

        self.started = time.monotonic()
        problem = self._start()
        if problem:
            os.waitpid(self.child, 0)
            self._report(problem)
            return
        while self.wait_status is None:
            self._end_below()
            if self.wait_status is None:
                self._wait(self._next())
                self._reap()
        self._leave_nothing()
        self._report("")

    def _start(self) -> str:
        """Fork and execute the command; what went wrong, in one sentence, or ""."""
        environment = initial_environment()
        told, tell = os.pipe2(os.O_CLOEXEC)
        shim = os.getpid()
        self.child = os.fork()
        if self.child == 0:
            try:
                os.close(told)
                become(self.argv, environment, self.cpus, shim, tell)
            finally:
                os._exit(127)
        os.close(tell)
        with open(told, "rb") as answer:  # noqa: PTH123
            return answer.read().decode("utf-8", "replace")

    def _ask(self, who: str) -> None:
        if not self.asked:
            self.asked = who

    def _next(self) -> float | None:
        """Seconds until something must be done without being told; None: nothing."""
        if self.term_at is None:
            return None
        return max(0.0, self.term_at + self.grace - time.monotonic())

    def _wait(self, seconds: float | None) -> None:
        """Until a child ended, the lab spoke, or the time is over."""
        for descriptor, _ in self.poll.poll(None if seconds is None else seconds * 1000 + 1):
            if descriptor == self.wake_read:
                os.read(self.wake_read, 4096)
                continue
            said = os.read(self.control, 64)
            if not said:
                self.poll.unregister(self.control)
                self._ask("lab")
            elif b"k" in said:
                self.kill_now = True
                self._ask("kill")
            else:
                self._ask("terminate")

    def _reap(self) -> bool:
        """Collect all that ended; whether any child remains."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.child:
                self.ended, self.wait_status = time.monotonic(), status
                if self.asked:
                    self.ended_by = self.asked

    def _end_below(self) -> None:
        """Do the next thing towards an end that was asked for: TERM once, KILL when the grace is over."""
        if not self.asked:
            return
        if self.term_at is None:
            self.term_at = time.monotonic()
            if not self.kill_now:
                terminate(self._running())
        if self.kill_now or time.monotonic() >= self.term_at + self.grace:
            self._kill_below()

    def _running(self) -> set[int]:
        return alive_below({os.getpid()})

    def _kill_below(self) -> None:
        deadline = time.monotonic() + UNKILLABLE
        while self._reap():
            freeze_and_kill(self._running)
            if time.monotonic() >= deadline:
                self.survivors = len(self._running())
                if self.wait_status is None:
                    self.ended, self.wait_status = time.monotonic(), signal.SIGKILL
                return
            # Adopting and reaping what was killed takes a few rounds: each makes the next ones our children.
            self._wait(PAUSE)

    def _leave_nothing(self) -> None:
        """End what the direct child left running, and count it."""
        settled = self.ended + SETTLE
        while self._reap() and not self.asked and time.monotonic() < settled:
            self._wait(PAUSE)
        if self.survivors or not self._reap():
            return
        # After an asked end, others below are still inside their grace, not left over.
        if self.asked and self.term_at is not None:
            grace = self.grace
        else:
            self.leftovers = len(self._running())
            self.term_at, grace = time.monotonic(), min(LEFTOVER_GRACE, self.grace)
            terminate(self._running())
        while self._reap():
            if self.kill_now or time.monotonic() >= self.term_at + grace:
                self._kill_below()
                return
            self._wait(PAUSE)

    def _report(self, problem: str) -> None:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        status = self.wait_status
        values: dict[str, int | float | str | None] = {
            "exit": os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None,
            "signal": os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None,
            "ended_by": self.ended_by,
            "started": self.started,
            "ended": self.ended or time.monotonic(),
            "cpu": used.ru_utime + used.ru_stime,
            "maxrss": used.ru_maxrss * 1024,
            "leftovers": self.leftovers,
            "survivors": self.survivors,
            "problem": problem,
        }
        try:
            os.write(self.status, as_json(values).encode() + b"\n")
        except OSError:
            # The lab has died: nobody is left to be told.
            return


def become(argv: list[bytes], environment: dict[bytes, bytes], cpus: set[int], shim: int, tell: int) -> None:
    """In the forked child: turn into the command, or write to `tell` why that cannot be done."""
    try:
        # A session of its own: a cell that signals its whole process group must not hit the shim.
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != shim:
            return
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if cpus:
            os.sched_setaffinity(0, cpus)
    except OSError as error:
        what = f"the cell cannot be pinned to cores {sorted(cpus)}" if cpus else "the cell cannot be set up"
        os.write(tell, f"{what}: {error.strerror}".encode())
        return
    try:
        os.execvpe(argv[0], argv, environment)  # noqa: S606 - without a shell, on purpose
    except OSError as error:
        os.write(tell, why_not(argv[0], error).encode())
    except ValueError as error:
        os.write(tell, f"the command cannot be executed: {error}".encode())


def keep(descriptor: int) -> None:
    """Withhold a descriptor from what is executed here (one that is closed meanwhile is passed over)."""
    try:
        os.set_inheritable(descriptor, False)
    except OSError:
        return


def why_not(name: bytes, error: OSError) -> str:
    """One sentence for a command that could not be executed."""
    shown = os.fsdecode(name)
    if error.errno == errno.ENOENT:
        if os.path.exists(name):  # noqa: PTH110
            return f"{shown!r} cannot be executed: the interpreter named in its first line does not exist"
        where = "there is no such file" if b"/" in name else "no directory of PATH has it"
        return f"{shown!r} cannot be executed: {where}"
    if error.errno == errno.EACCES:
        return f"{shown!r} cannot be executed: permission denied (is it a file, and marked executable?)"
    if error.errno == errno.ENOEXEC:
        return f"{shown!r} cannot be executed: it is no program, and its first line names no interpreter (#!)"
    return f"{shown!r} cannot be executed: {error.strerror}"


def initial_environment() -> dict[bytes, bytes]:
    """The environment as the lab passed it: this interpreter may have added a locale to its own."""
    with open("/proc/self/environ", "rb") as file:  # noqa: PTH123
        pairs = [pair.split(b"=", 1) for pair in file.read().split(b"\0") if b"=" in pair]
    return {pair[0]: pair[1] for pair in pairs}


def as_json(values: dict[str, int | float | str | None]) -> str:
    """JSON for one flat object. By hand: importing json would cost a third of the shim's start."""
    return "{" + ", ".join(f'"{name}": {_literal(value)}' for name, value in values.items()) + "}"


def _literal(value: int | float | str | None) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return '"' + "".join(map(_escaped, value)) + '"'
    return repr(value)


def _escaped(letter: str) -> str:
    if letter.isascii() and letter.isprintable() and letter not in '"\\':
        return letter
    return f"\\u{min(ord(letter), 0xFFFD):04x}"


def main() -> None:
    control, status = int(sys.argv[1]), int(sys.argv[2])
    # Had the cell these, its own end of file would never come, and the lab's death would go unnoticed. What else
    # the lab handed down is a lock: held as long as the shim is there, and by nobody else.
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) > 2:
            keep(int(name))
    cpus = {int(core) for core in sys.argv[4].split(",") if core}
    argv = [os.fsencode(word) for word in sys.argv[5:]]
    Shim(control, status, float(sys.argv[3]), cpus, argv).run()


if __name__ == "__main__":
    main()
