"""smolvm's command line: the daemon, one golden machine, its clones, and that none of them is left behind.

Only machines with our own prefix are ever removed, and only the daemon that was started here is ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.peers.smolvm.prerequisites import Prerequisites
from coresident.errors import MachineError

PREFIX = "coresident-"
GOLDEN = f"{PREFIX}g"
# The harness's own limits.
SOCKET_SECONDS, COMMAND_SECONDS = 10.0, 300.0
SHARE = {"on": "1", "off": "0"}
SHARED = re.compile(r"shared=(\d+) private=(\d+)")
# Where a machine finds the coordination directory.
INSIDE = "/opt/coord"
# Linux's limit of a socket's name, less its final zero.
LONGEST_SOCKET = 107


@dataclass(frozen=True)
class Daemon:
    """The running daemon: its process (a session of its own) and its log."""

    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raise MachineError if it has ended."""
        code = self.process.poll()
        if code is not None:
            said = tail(self.log)
            raise MachineError(f"smolvm's daemon ended with status {code}{said}", f"see {self.log}")

    def shared(self) -> tuple[int, int] | None:
        """The last weight ranges that it says it shared and kept private; None where it said nothing."""
        found = SHARED.findall(self.log.read_text(encoding="utf-8", errors="replace"))
        return (int(found[-1][0]), int(found[-1][1])) if found else None


@contextlib.contextmanager
def daemon(found: Prerequisites, log: Path) -> Iterator[Daemon]:
    """Start the daemon and wait for its socket; in the end it and all its workers are gone.

    Raises MachineError where another one listens already, or this one does not come up.
    """
    path = Path(found.settings.socket)
    if len(str(path)) > LONGEST_SOCKET:
        raise MachineError(f"smolvm.socket is longer than {LONGEST_SOCKET} characters", "name a shorter path")
    if _listens(path):
        raise MachineError(f"another smolvm daemon listens on {path}", "end it: two of them share one card")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    environment = found.variables | {
        "SMOLVM_CUDA_FORK_WORKERS": "1",
        "SMOLVM_CUDA_FORK_ISOLATE": "1",
        "SMOLVM_CUDA_DAEMON_IDLE_SECS": "0",
        "RUST_LOG": "warn,smolvm::cuda_daemon=info",
    }
    environment.pop("SMOLVM_CUDA_FORK_SHARE_WEIGHTS", None)
    if found.settings.share in SHARE:
        environment["SMOLVM_CUDA_FORK_SHARE_WEIGHTS"] = SHARE[found.settings.share]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [str(found.binary), "_cuda-daemon", str(path)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = Daemon(process, log)
    try:
        deadline = time.monotonic() + SOCKET_SECONDS
        while not path.is_socket():
            running.check()
            if time.monotonic() > deadline:
                raise MachineError(
                    f"smolvm's daemon made no socket {path} within {SOCKET_SECONDS:g} s{tail(log)}",
                    f"see {log}",
                )
            time.sleep(0.02)
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def golden(found: Prerequisites, coordination: Path, parameters: DPO) -> Iterator[None]:
    """Create and start the machine that loads the base; in the end it is removed with its clones."""
    create = ["create", "--name", GOLDEN, "--cuda", "--net", "-v", f"{coordination}:{INSIDE}:rw"]
    create += ["--from", str(found.pack), "--storage", "30", "--overlay", "20", "--", "sh", "-c"]
    try:
        _machine(found, [*create, guest(found, parameters)], "the golden machine could not be created")
        start = ["start", "--forkable", "--name", GOLDEN]
        shared = {"SMOLVM_CUDA_SHARED": "1"}
        _machine(found, start, "the golden machine could not be started", shared)
        yield
    finally:
        with contextlib.suppress(MachineError):
            _machine(found, ["rm", "--name", GOLDEN, "--cascade"], "the machines could not be removed")


def guest(found: Prerequisites, parameters: DPO) -> str:
    """What the golden machine runs, and each clone goes on with: the harness's line, with our parameters."""
    settings = found.settings
    values = {
        "HF_HOME": "/opt/hfcache",
        "HF_HUB_OFFLINE": "0",
        "COORD": INSIDE,
        "ARM": "fork",
        "FORK": "1",
        "STEPS": parameters.steps,
        "NSLOTS": parameters.learners,
        "MODEL": found.model,
        "OUTBASE": "/root",
        "BATCH": parameters.batch,
        "MAXSEQ": parameters.max_length,
        "DPO_BETA": parameters.beta,
        "PYTORCH_CUDA_ALLOC_CONF": settings.alloc_conf,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    exported = " ".join(f"{name}={value}" for name, value in values.items())
    return f"export {exported}; {settings.guest_python} {INSIDE}/dpo_train.py 2>>{INSIDE}/g.err"


def fork(found: Prerequisites, number: int) -> None:
    """Clone the golden machine. Raises MachineError naming the clone that could not be."""
    argv = ["fork", "--golden", GOLDEN, "--name", f"{GOLDEN}-c{number}", "--share-weights"]
    _machine(found, argv, f"clone {number} could not be forked")


def remove_leftovers(found: Prerequisites) -> list[str]:
    """Remove what a killed run left; returns the machines' names."""
    listed = _machine(found, ["list"], "smolvm's machines could not be listed")
    names = [words[0] for line in listed.splitlines() if (words := line.split())]
    ours = [name for name in names if name.startswith(PREFIX)]
    for name in ours:
        _machine(found, ["rm", "--name", name, "--force"], f"the machine {name} of an earlier run stays")
    return ours


def _machine(found: Prerequisites, words: list[str], problem: str, more: dict[str, str] | None = None) -> str:
    argv = [str(found.binary), "machine", *words]
    # Files, not pipes: a machine that lives on may keep what its starter wrote to, and a pipe would never end.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                argv,
                env=found.variables | (more or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                check=False,
                timeout=COMMAND_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise MachineError(
                f"{problem}: no answer within {COMMAND_SECONDS:g} s", "try `smolvm machine list`"
            ) from None
        said, why = (_written(stream) for stream in (out, errors))
    if done.returncode != 0:
        lines = (why or said).strip().splitlines() or [f"exit status {done.returncode}"]
        raise MachineError(
            f"{problem}: {lines[-1]}", f"try it by hand: {found.binary} machine {' '.join(words[:4])} ..."
        )
    return said


def _written(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")


def _listens(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
        return True
    return False


def tail(log: Path) -> str:
    """The last line of a log, to be said after what went wrong; "" without one."""
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if lines:
            return f" (its last line: {lines[-1][:200]})"
    return ""
