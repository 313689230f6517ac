"""What git says of a folder: commit, changes of tracked files, untracked names. Where git cannot say, the
fact says why."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

TIMEOUT = 10.0
LISTED = 20
# The answer stands for this many times what it cost, so that asking before every cell stays below 2 % of
# the time.
_STANDS = 50


@dataclass(frozen=True)
class State:
    """`why` is empty where git answered. `diff` hashes the changes of tracked files ("clean": none);
    `untracked` holds at most 20 names of `untracked_count`."""

    why: str = ""
    commit: str = ""
    diff: str = "clean"
    changed: tuple[str, ...] = ()
    untracked: tuple[str, ...] = ()
    untracked_count: int = 0

    @property
    def dirty(self) -> bool:
        return self.diff != "clean"


_known: dict[str, tuple[float, State]] = {}


def state(folder: Path) -> State:
    """The state of the repository that `folder` is in. Never raises."""
    key = str(folder.absolute())
    until, known = _known.get(key, (0.0, State()))
    now = time.monotonic()
    if now < until:
        return known
    try:
        known = _ask(key)
    except FileNotFoundError:
        known = State(why="git is not installed" if folder.is_dir() else f"{folder} is no directory")
    except subprocess.TimeoutExpired:
        known = State(why=f"git did not answer within {TIMEOUT:g} s")
    except _Refused as why:
        known = State(why=str(why))
    except OSError as error:
        known = State(why=f"git cannot be run: {error.strerror}")
    ended = time.monotonic()
    _known[key] = (ended + _STANDS * (ended - now), known)
    return known


class _Refused(Exception):  # noqa: N818 - an answer of git's
    """Git answered that it will not."""


def _ask(folder: str) -> State:
    told = _git(folder, "status", "--porcelain=v2", "--branch", "-z", "--untracked-files=normal")
    commit, changed, untracked = "", [], []
    entries = iter(told.decode("utf-8", "surrogateescape").split("\0"))
    for entry in entries:
        if entry.startswith("# branch.oid "):
            commit = entry.split(" ", 2)[2]
        elif entry.startswith("? "):
            untracked.append(entry[2:])
        elif entry.startswith("1 "):
            changed.append(entry.split(" ", 8)[8])
        elif entry.startswith("2 "):
            changed.append(entry.split(" ", 9)[9])
            next(entries, None)  # the name before the rename
        elif entry.startswith("u "):
            changed.append(entry.split(" ", 10)[10])
    diff = "clean"
    if changed:
        against = ["--cached"] if commit == "(initial)" else ["HEAD"]
        diff = hashlib.sha256(
            _git(folder, "diff", "--no-ext-diff", "--no-textconv", "--binary", *against)
        ).hexdigest()
    return State(
        commit=commit,
        diff=diff,
        changed=tuple(_printable(name) for name in changed[:LISTED]),
        untracked=tuple(_printable(name) for name in untracked[:LISTED]),
        untracked_count=len(untracked),
    )


def _git(folder: str, *arguments: str) -> bytes:
    # No lock taken, no prompt, and nothing run that a repository's own configuration names.
    variables = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    done = subprocess.run(
        ["git", "-c", "core.fsmonitor=false", "-C", folder, *arguments],
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().partition("\n")[0].removeprefix("fatal: ")
        if "dubious ownership" in said:
            said = "git refuses a repository of another owner (git config --global --add safe.directory)"
        elif "not a git repository" in said:
            said = "not a git repository"
        raise _Refused(said or f"git ended with status {done.returncode}")
    return done.stdout


def _printable(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
