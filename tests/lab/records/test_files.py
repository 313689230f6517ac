"""A file is there whole or not at all, whatever dies when: real processes, real signals, a real full disk."""

from __future__ import annotations

import contextlib
import fcntl
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from coresident.errors import MachineError
from coresident.lab.records.files import ASIDE, Disk

CONTENT = b"x" * 100_000

# Writes one file and kills itself at step `last`, counted over all steps; exits 0 if it never gets there.
KILLED = """
import os, signal, sys
from pathlib import Path
from coresident.lab.records.files import Disk

method, path, content, last = sys.argv[1], Path(sys.argv[2]), sys.argv[3].encode() * 100_000, int(sys.argv[4])
done = 0

def stepping(name):
    plain = getattr(Disk, name)
    def step(self, *arguments):
        global done
        if done == last:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1
        if name == "write":
            return plain(self, arguments[0], arguments[1][:40_000])
        return plain(self, *arguments)
    return step

steps = ("create", "write", "sync", "link", "rename", "unlink", "sync_directory")
Killed = type("Killed", (Disk,), {name: stepping(name) for name in steps})
getattr(Killed(), method)(path, content)
"""


def killed_at(step: int, method: str, path: Path, letter: str) -> int:
    return subprocess.run([sys.executable, "-c", KILLED, method, path, letter, str(step)]).returncode


def contents(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_publish_writes_the_content_and_nothing_else(tmp_path):
    Disk().publish(tmp_path / "a.json", CONTENT)
    assert (tmp_path / "a.json").read_bytes() == CONTENT
    assert contents(tmp_path) == {"a.json"}


@pytest.mark.parametrize(("method", "naming"), [("publish", ["link", "unlink"]), ("replace", ["rename"])])
def test_content_is_on_the_disk_before_its_name_and_the_name_before_the_end(tmp_path, method, naming):
    steps = []

    class Noting(Disk):
        def __getattribute__(self, name: str):
            if not name.startswith("_") and name != method:
                steps.append(name)
            return super().__getattribute__(name)

    getattr(Noting(), method)(tmp_path / "a.json", CONTENT)
    assert steps == ["create", "write", "sync", *naming, "sync_directory"]


def test_publish_never_replaces(tmp_path):
    Disk().publish(tmp_path / "a.json", b"first")
    with pytest.raises(FileExistsError, match=r"a\.json exists already"):
        Disk().publish(tmp_path / "a.json", b"second")
    assert (tmp_path / "a.json").read_bytes() == b"first"
    assert contents(tmp_path) == {"a.json"}


def test_replace_takes_the_place_of_what_was_there(tmp_path):
    Disk().replace(tmp_path / "a.json", b"first")
    Disk().replace(tmp_path / "a.json", b"second")
    assert (tmp_path / "a.json").read_bytes() == b"second"
    assert contents(tmp_path) == {"a.json"}


@pytest.mark.parametrize("method", ["publish", "replace"])
def test_a_kill_at_any_step_leaves_all_or_nothing(tmp_path, method):
    path, ended = tmp_path / "a.json", []
    for step in range(20):
        path.unlink(missing_ok=True)
        code = killed_at(step, method, path, "x")
        assert code in (0, -signal.SIGKILL)
        assert not path.exists() or path.read_bytes() == CONTENT
        ended.append((code, path.exists()))
        Disk().sweep(tmp_path)
        assert contents(tmp_path) <= {"a.json"}
        if code == 0:
            break
    # Some kills came before the file had its name, some after, and the last run was not killed.
    assert {exists for code, exists in ended if code} == {False, True}
    assert ended[-1] == (0, True) and len(ended) >= 7


def test_a_kill_at_any_step_of_replace_keeps_the_old_content_or_has_the_new(tmp_path):
    path = tmp_path / "a.json"
    for step in range(20):
        path.write_bytes(b"old")
        code = killed_at(step, "replace", path, "n")
        assert path.read_bytes() in (b"old", b"n" * 100_000)
        if code == 0:
            assert path.read_bytes() == b"n" * 100_000
            break


def test_what_a_living_writer_holds_aside_is_not_swept(tmp_path):
    found = []

    class Slow(Disk):
        def sync(self, descriptor: int) -> None:
            found.extend(Disk().sweep(tmp_path))
            super().sync(descriptor)

    Slow().publish(tmp_path / "a.json", CONTENT)
    assert found == []
    assert (tmp_path / "a.json").read_bytes() == CONTENT


def test_a_writer_whose_file_was_swept_before_it_was_locked_starts_again(tmp_path):
    class Swept(Disk):
        swept = 0

        def create(self, aside: Path) -> int:
            descriptor = super().create(aside)
            if self.swept < 2:
                self.swept += len(Disk().sweep(tmp_path))
            return descriptor

    disk = Swept()
    disk.publish(tmp_path / "a.json", CONTENT)
    assert disk.swept == 2
    assert (tmp_path / "a.json").read_bytes() == CONTENT


def test_sweeping_spares_everything_else(tmp_path):
    (tmp_path / f"{ASIDE}dead").write_bytes(b"half")
    (tmp_path / "record.json").write_bytes(b"{}")
    assert Disk().sweep(tmp_path) == [tmp_path / f"{ASIDE}dead"]
    assert contents(tmp_path) == {"record.json"}
    assert Disk().sweep(tmp_path / "nowhere") == []


def test_of_many_writers_of_one_name_exactly_one_wins(tmp_path):
    results: list[str] = []
    barrier = threading.Barrier(8)

    def write(number: int) -> None:
        barrier.wait()
        try:
            Disk().publish(tmp_path / "a.json", str(number).encode())
            results.append(str(number))
        except FileExistsError:
            results.append("refused")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [winner] = [result for result in results if result != "refused"]
    assert (tmp_path / "a.json").read_text() == winner
    assert contents(tmp_path) == {"a.json"}


@contextlib.contextmanager
def mounted(directory: Path, *options: str):
    directory.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, directory], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"mounting is refused here: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


@pytest.mark.parametrize("method", ["publish", "replace"])
def test_a_full_disk_is_named_and_leaves_no_half(tmp_path, method):
    with mounted(tmp_path / "tiny", "-t", "tmpfs", "-o", "size=64k", "tmpfs") as tiny:
        Disk().publish(tiny / "before.json", b"kept")
        with pytest.raises(MachineError) as caught:
            getattr(Disk(), method)(tiny / "a.json", CONTENT)
        assert "a.json: no space left" in caught.value.problem
        assert "free space" in caught.value.remedy
        assert contents(tiny) == {"before.json"}
        assert (tiny / "before.json").read_bytes() == b"kept"


def test_a_limit_on_file_size_is_told_like_a_full_disk(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(MachineError, match="file too large"):
            Disk().publish(tmp_path / "a.json", CONTENT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(tmp_path) == set()


def test_a_read_only_directory_is_named(tmp_path):
    with mounted(tmp_path / "tiny", "-t", "tmpfs", "-o", "ro", "tmpfs") as tiny:
        for write in (Disk().publish, Disk().replace):
            with pytest.raises(MachineError) as caught:
                write(tiny / "a.json", b"x")
            assert "read-only" in caught.value.problem and "writable" in caught.value.remedy
        with pytest.raises(MachineError, match="read-only"):
            Disk().directory(tiny / "a" / "b")


def test_a_parent_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(MachineError, match="not a directory"):
        Disk().publish(tmp_path / "file" / "a.json", b"x")
    with pytest.raises(MachineError, match="cannot write"):
        Disk().directory(tmp_path / "file" / "below")
    assert contents(tmp_path) == {"file"}


def test_no_descriptor_is_left_open(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    Disk().publish(tmp_path / "a.json", CONTENT)
    Disk().replace(tmp_path / "a.json", CONTENT)
    with contextlib.suppress(FileExistsError):
        Disk().publish(tmp_path / "a.json", CONTENT)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_lock_is_gone_with_its_writer(tmp_path):
    killed_at(3, "publish", tmp_path / "a.json", "x")
    [aside] = tmp_path.iterdir()
    with aside.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
