"""NVIDIA's Multi-Process Service for one pool: started privately, read back, and always stopped.

Without it, kernels of different processes take turns on a card. The service finds its clients by sockets in
a directory, named by CUDA_MPS_PIPE_DIRECTORY; ours is a fresh temporary one, so that nobody else's service is
used or disturbed. A socket's path ends at 107 bytes, which a run directory would exceed.
(NVIDIA, "Multi-Process Service", https://docs.nvidia.com/deploy/mps/)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coresident.errors import MachineError

PROGRAM = "nvidia-cuda-mps-control"
# Clients a device; the manual's figure, since no query tells it.
CLIENT_LIMIT = 48
SOCKET_PATH_LIMIT = 107
LONGEST_SOCKET = "control_privileged"
PATIENCE = 20.0
# Seconds for a service to end by itself; with clients that were killed it may never.
ENDING = 6.0
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
# A process that is to run without the service must not find somebody else's.
WITHOUT = {PIPES: "/dev/null"}


@dataclass(frozen=True)
class Service:
    """A running service. `directory` holds its sockets and its log."""

    directory: Path
    device: str

    @property
    def variables(self) -> dict[str, str]:
        """What makes a process a client of it."""
        return {PIPES: str(self.directory), LOGS: str(self.directory)}

    def clients(self) -> dict[int, list[int]]:
        """Process ids of each server's clients, as the control daemon tells them. Raises MachineError."""
        return {
            server: _ids(self.ask(f"get_client_list {server}"))
            for server in _ids(self.ask("get_server_list"))
        }

    def ask(self, order: str, patience: float = PATIENCE) -> str:
        """The daemon's answer to one order, within `patience` seconds. Raises MachineError where there is none."""
        try:
            done = subprocess.run(
                [PROGRAM],
                input=order + "\n",
                env=self._environment(),
                capture_output=True,
                text=True,
                timeout=patience,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MachineError(
                f"the MPS control daemon does not answer {order!r}: {error}", self._remedy()
            ) from None
        if done.returncode != 0:
            said = " ".join((done.stderr or done.stdout).split())
            raise MachineError(f"the MPS control daemon refused {order!r}: {said}", self._remedy())
        return done.stdout

    def start(self) -> None:
        """Start the daemon; it is up when this returns. Raises MachineError."""
        with (self.directory / "start.log").open("wb") as log:
            # To a file: the daemon keeps what it inherits open, and a pipe would never end.
            try:
                done = subprocess.run(
                    [PROGRAM, "-d"],
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    timeout=PATIENCE,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise MachineError(f"MPS cannot be started: {error}", self._remedy()) from None
        if done.returncode != 0:
            said = " ".join((self.directory / "start.log").read_text(errors="replace").split())
            raise MachineError(
                f"MPS cannot be started: {said or f'status {done.returncode}'}", self._remedy()
            )

    def stop(self) -> None:
        """Tell the daemon to quit, see that it is gone, and kill it if it is not."""
        pid = self._pid()
        with contextlib.suppress(MachineError):
            self.ask("quit -t 2", ENDING)
        deadline = time.monotonic() + ENDING
        while pid is not None and _lives(pid):
            if time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.02)

    def _pid(self) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            return int((self.directory / f"{PROGRAM}.pid").read_text(encoding="ascii"))
        return None

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.variables, "CUDA_VISIBLE_DEVICES": self.device}

    def _remedy(self) -> str:
        return "set mps: off, or see NVIDIA's manual of the Multi-Process Service for what it needs"


@contextlib.contextmanager
def service(device: str) -> Iterator[Service]:
    """A service for the card `device` (a UUID) during the block. Raises MachineError where it cannot run."""
    if shutil.which(PROGRAM) is None:
        raise MachineError(
            f"mps: on needs {PROGRAM}, which is not installed", "install the driver's tools or set mps: off"
        )
    directory = Path(tempfile.mkdtemp(prefix="mps-", dir=_short(tempfile.gettempdir())))
    running = Service(directory, device)
    try:
        try:
            running.start()
            yield running
        finally:
            # Also after a start that failed half-way: then there may be a daemon all the same.
            running.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _short(wanted: str) -> str:
    """A temporary directory in which the sockets' paths fit."""
    room = SOCKET_PATH_LIMIT - len("/mps-12345678/") - len(LONGEST_SOCKET)
    return wanted if len(os.fsencode(wanted)) <= room else "/tmp"  # noqa: S108


def _ids(told: str) -> list[int]:
    return [int(word) for word in told.split() if word.isdigit()]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError, IndexError):
        # A zombie that its parent has not waited for is gone.
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] != "Z"
    return True
