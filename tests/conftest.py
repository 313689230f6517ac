"""The command line as a user meets it: arguments in; status, standard output and standard error out."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

SMALL = """\
study: small
question: Is two more than one?
workload: command
parameters:
  shell: >-
    echo said;
    printf '{"event": "metric", "name": "speed", "value": %s, "unit": "1/s"}\\n' $SPEED > $CORESIDENT_EVENTS/a.jsonl
arms:
  one: {env: {SPEED: 1}}
  two: {env: {SPEED: 2}}
repetitions: {min: 3}
controls: [exclusive-device]
hypotheses:
  faster:
    claim: two is at least one and a half times as fast as one
    metric: speed
    compare: {arm: two, to: one}
    expect: {ratio: {at_least: 1.5}}
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a card run where there is one."""
    if Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA card, and this machine has none"))


@dataclass(frozen=True)
class Told:
    """What a command said, and the status it exited with."""

    status: int
    out: str
    err: str


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; what is kept outside of run directories is kept beside it."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("CORESIDENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CORESIDENT_LOCKS", str(tmp_path / "locks"))
    return work


@pytest.fixture(scope="session")
def called() -> Callable[..., Told]:
    """Runs `coresident ARGUMENTS` in this process."""
    from coresident.cli.app import main

    def call(*arguments: str) -> Told:
        # Files, since what starts processes wants descriptors.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            with (
                pytest.MonkeyPatch.context() as patch,
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
                pytest.raises(SystemExit) as ended,
            ):
                patch.setattr(sys, "argv", ["coresident", *arguments])
                main()
            # A command that reads records ends soon, so it switches this off.
            gc.enable()
            for stream in (out, err):
                stream.seek(0)
            code = ended.value.code
            return Told(code if isinstance(code, int) else int(code is not None), out.read(), err.read())

    return call


@pytest.fixture
def coresident(place: Path, called: Callable[..., Told]) -> Callable[..., Told]:
    """Runs `coresident ARGUMENTS` in this process, in the working directory `place`."""
    return called


@pytest.fixture
def changed(place: Path) -> Callable[..., None]:
    """Writes `small.yaml`, with texts replaced."""

    def write(*replaced: tuple[str, str]) -> None:
        text = SMALL
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new)
        (place / "small.yaml").write_text(text)

    return write


@pytest.fixture(scope="session")
def _measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("measured")
    (work / "small.yaml").write_text(SMALL)
    subprocess.run(
        [sys.executable, "-m", "coresident", "run", "small.yaml"],
        cwd=work,
        env={**os.environ, "CORESIDENT_LOCKS": str(work / "locks")},
        check=True,
        capture_output=True,
    )
    return work


@pytest.fixture
def small(place: Path, _measured: Path) -> Path:
    """A finished run of two arms in three blocks, in `runs/small`, and its study in `small.yaml`."""
    shutil.copy(_measured / "small.yaml", place)
    shutil.copytree(_measured / "runs", place / "runs")
    return Path("runs/small")


@pytest.fixture
def listing() -> Callable[[Path], dict[str, str]]:
    """All that lies below a directory: names with the hashes of their contents."""

    def listed(directory: Path) -> dict[str, str]:
        found = {}
        for path in sorted(directory.rglob("*")):
            content = (
                path.read_bytes()
                if path.is_file()
                else str(path.readlink()).encode()
                if path.is_symlink()
                else b""
            )
            found[str(path.relative_to(directory))] = (
                f"{path.lstat().st_mode:o} {hashlib.sha256(content).hexdigest()}"
            )
        return found

    return listed
