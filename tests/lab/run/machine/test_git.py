"""What git says, from real repositories; where it cannot say, the fact says why."""

import os
import subprocess

import pytest

from coresident.lab.run.machine import git


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    git._known.clear()
    monkeypatch.setattr(git, "_STANDS", 0)


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    run(folder, "init", "-q")
    (folder / "tracked.txt").write_text("one\n")
    run(folder, "add", ".")
    run(folder, "-c", "user.name=T", "-c", "user.email=t@t", "commit", "-qm", "first")
    return folder


def run(folder, *arguments):
    return subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_clean_commit(repository):
    found = git.state(repository)
    assert (found.why, found.commit, found.dirty) == ("", run(repository, "rev-parse", "HEAD"), False)


def test_changes_of_tracked_files_are_told_and_hashed(repository):
    (repository / "tracked.txt").write_text("two\n")
    first = git.state(repository)
    (repository / "tracked.txt").write_text("three\n")
    second = git.state(repository)
    assert first.dirty
    assert first.changed == ("tracked.txt",)
    assert first.diff != second.diff


def test_staged_and_renamed_files_are_changes_too(repository):
    run(repository, "mv", "tracked.txt", "moved name.txt")
    (repository / "new").write_text("x")
    run(repository, "add", "new")
    assert set(git.state(repository).changed) == {"moved name.txt", "new"}


def test_untracked_files_are_listed_and_change_no_hash(repository):
    for number in range(30):
        (repository / f"note {number}").write_text("x")
    found = git.state(repository)
    assert (found.diff, found.untracked_count, len(found.untracked)) == ("clean", 30, git.LISTED)


def test_a_folder_inside_sees_the_whole_repository(repository):
    (repository / "inner").mkdir()
    (repository / "tracked.txt").write_text("two\n")
    assert git.state(repository / "inner").dirty


def test_a_repository_without_a_commit(tmp_path):
    run(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("x")
    run(tmp_path, "add", "a")
    found = git.state(tmp_path)
    assert (found.commit, found.changed) == ("(initial)", ("a",))


def test_no_repository(tmp_path):
    assert git.state(tmp_path).why == "not a git repository"


def test_no_folder(tmp_path):
    assert git.state(tmp_path / "none").why != ""


def test_no_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git.state(tmp_path).why == "git is not installed"


def test_a_git_that_hangs_is_given_up(tmp_path, monkeypatch):
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 20\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(git, "TIMEOUT", 0.2)
    assert git.state(tmp_path).why == "git did not answer within 0.2 s"


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_a_repository_of_another_owner(repository, monkeypatch):
    for path in (repository, *repository.rglob("*")):
        os.chown(path, 65534, 65534)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    assert "safe.directory" in git.state(repository).why


def test_the_answer_stands_as_long_as_it_was_dear(repository, monkeypatch):
    monkeypatch.setattr(git, "_STANDS", 10_000)
    assert not git.state(repository).dirty
    (repository / "tracked.txt").write_text("two\n")
    assert not git.state(repository).dirty
