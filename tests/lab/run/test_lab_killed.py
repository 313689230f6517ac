"""SIGKILL of the lab while a cell runs: nothing of the cell is left, although nobody is there to end it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

LAB = """
import os, sys
from pathlib import Path
from coresident.lab.run.process.supervise import supervise
supervise([sys.executable, "-I", "-S", "cell.py"], env=dict(os.environ), cwd=".", stdout=Path("out"),
          stderr=Path("err"), timeout=60, grace=float(sys.argv[1]))
"""

# The grandchild lives in a session of its own, is nobody's child, and ignores SIGTERM.
CELL = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("ready", "w").close()
        time.sleep(60)
    os._exit(0)
os.wait()
time.sleep(60)
"""


def alive_in(place: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if path.readlink() == place:
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("grace", [0.2, 1.0])
def test_a_killed_lab_leaves_no_orphan(tmp_path: Path, grace: float) -> None:
    (tmp_path / "cell.py").write_text(textwrap.dedent(CELL))
    lab = subprocess.Popen([sys.executable, "-c", LAB, str(grace)], cwd=tmp_path, env=dict(os.environ))
    deadline = time.monotonic() + 5
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(alive_in(tmp_path)) >= 4  # the lab, the shim, the cell and its grandchild
    lab.kill()
    lab.wait()
    killed = time.monotonic()
    time.sleep(grace / 2)
    assert alive_in(tmp_path) != [], "the grandchild ignores SIGTERM: it has its grace"
    while alive_in(tmp_path):
        assert time.monotonic() < killed + grace + 1, "something of the cell outlived the lab"
        time.sleep(0.01)
