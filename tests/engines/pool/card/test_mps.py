"""The service is started privately, asked, and always stopped. A script stands in for NVIDIA's program and keeps
its contract: `-d` starts a daemon that serves orders in CUDA_MPS_PIPE_DIRECTORY until it is told to quit.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import psutil
import pytest

from coresident.engines.pool.card import mps
from coresident.errors import MachineError

STAND_IN = """#!{python}
import os, socket, sys
place = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1"
path = place + "/control"
if sys.argv[1:] == ["-d"]:
    if os.environ.get("REFUSES"):
        sys.exit("the card does not allow it")
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    if child := os.fork():
        with open(place + "/nvidia-cuda-mps-control.pid", "w") as file:
            file.write(str(child))
        os._exit(0)
    os.setsid()
    while True:
        peer, _ = server.accept()
        order = peer.recv(1000).decode().split()
        if order[0] == "quit" and not os.environ.get("STAYS"):
            peer.sendall(b"\\n")
            os._exit(0)
        answers = {{"get_server_list": "501\\n", "get_client_list": "601\\n602\\n"}}
        peer.sendall(answers.get(order[0], "\\n").encode())
        peer.close()
peer = socket.socket(socket.AF_UNIX)
peer.connect(path)
peer.sendall(sys.stdin.read().encode())
print(peer.recv(1000).decode(), end="")
"""


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "bin" / mps.PROGRAM
    script.parent.mkdir()
    script.write_text(STAND_IN.format(python=sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(script.parent))
    return script


def daemon(running: mps.Service) -> psutil.Process:
    return psutil.Process(int((running.directory / f"{mps.PROGRAM}.pid").read_text()))


def test_it_runs_in_a_private_directory_and_tells_its_clients() -> None:
    with mps.service("GPU-1") as running:
        assert running.variables["CUDA_MPS_PIPE_DIRECTORY"] == str(running.directory)
        assert running.directory.stat().st_mode & 0o077 == 0
        assert running.clients() == {501: [601, 602]}
        process = daemon(running)
        assert process.is_running()
    assert not psutil.pid_exists(process.pid) or process.status() == psutil.STATUS_ZOMBIE
    assert not running.directory.exists()


def test_it_is_stopped_when_the_pool_fails() -> None:
    with pytest.raises(ZeroDivisionError), mps.service("GPU-1") as running:
        process = daemon(running)
        raise ZeroDivisionError
    assert not psutil.pid_exists(process.pid) or process.status() == psutil.STATUS_ZOMBIE


def test_one_that_does_not_quit_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAYS", "1")
    monkeypatch.setattr(mps, "ENDING", 0.5)
    with mps.service("GPU-1") as running:
        process = daemon(running)
    process.wait(timeout=5)


def test_one_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSES", "1")
    with (
        pytest.raises(MachineError, match="MPS cannot be started: the card does not allow it"),
        mps.service("GPU-1"),
    ):
        pass


def test_without_the_program_there_is_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MachineError, match="which is not installed") as caught, mps.service("GPU-1"):
        pass
    assert "mps: off" in caught.value.remedy


def test_sockets_fit_however_long_the_temporary_directorys_path_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(mps.tempfile, "gettempdir", lambda: str(long))
    with mps.service("GPU-1") as running:
        longest = running.directory / mps.LONGEST_SOCKET
        assert len(os.fsencode(longest)) <= mps.SOCKET_PATH_LIMIT


def test_a_process_without_the_service_cannot_find_anybodys() -> None:
    assert not Path(mps.WITHOUT["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
