"""The directory of a training: whose it is, what was asked, what each update gave, and what became of it.

`run.json` says what was asked, `metrics.jsonl` what each update, window and validation gave, `checkpoints/` holds the state,
`result.json` the end. What a training does again after a crash is taken out of the metrics first, so that no row is there twice.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coresident import whole
from coresident.engines.pretrain.parameters import Train
from coresident.errors import MachineError, UserError
from coresident.held import LOCK, held

if TYPE_CHECKING:
    from coresident.engines.pretrain.recipe import Recipe

T = TypeVar("T")
RUN, METRICS, CHECKPOINTS, RESULT = "run.json", "metrics.jsonl", "checkpoints", "result.json"


@contextlib.contextmanager
def locked(out: Path, resume: bool) -> Iterator[None]:
    """`out` as this process's own: a new or empty directory, or with `resume` one that holds a training. A new one in which
    nothing was written is gone after it.

    Raises UserError where it is anything else, MachineError where another process has it.
    """
    if resume:
        saved(out)
    else:
        _check_free(out)
    new = not out.exists()
    with held(out):
        try:
            if not resume:
                # Another may have begun, and ended, since it was looked at.
                _check_free(out)
            # Of a file that was being written when its writer was killed.
            for left in out.glob(".*.json*.*"):
                left.unlink(missing_ok=True)
            yield
        finally:
            if new and [one.name for one in out.iterdir()] == [LOCK]:
                with contextlib.suppress(OSError):
                    (out / LOCK).unlink()
                    out.rmdir()


def _check_free(out: Path) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out} is no directory", "choose another --out; nothing was changed")
    names = sorted(one.name for one in out.iterdir() if not one.name.startswith("."))
    if any(name in names for name in (RUN, METRICS, CHECKPOINTS)):
        remedy = "add --resume to go on with it, or choose another --out; nothing was changed"
        raise UserError(f"{out} holds a training already", remedy)
    if names:
        raise UserError(
            f"{out} holds {names[0]!r} and no training",
            "give a new --out, or an empty one; nothing was changed",
        )


def describe(out: Path, settings: Train, asked: Recipe, tokenizer: Mapping[str, str]) -> None:
    """Say what is asked of the training in `out`. `tokenizer` maps the files of its tokenizer to their checksums."""
    described = {
        "parameters": settings.model_dump(mode="json"),
        "recipe": asked.identity(),
        "tokenizer": dict(tokenizer),
    }
    whole.write_json(out / RUN, described)


def saved(out: Path) -> Train:
    """What was asked of the training in `out`. Raises UserError where there is none."""
    return _described(out, lambda told: Train.model_validate_json(json.dumps(told["parameters"])))


def tokenizer(out: Path) -> dict[str, str]:
    """The checksums of the tokenizer that the training in `out` has. Raises UserError where there is none."""
    return _described(out, lambda told: dict(told["tokenizer"]))


def _described(out: Path, read: Callable[[Any], T]) -> T:
    file = out / RUN
    try:
        return read(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(
            f"{out} holds no training ({RUN} is not there)", "name the --out of a `pretrain train`"
        ) from None
    except NotADirectoryError:
        raise UserError(f"{out} is no directory", "name the --out of a `pretrain train`") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} cannot be used: {' '.join(str(error).split())}",
            "put it back from a copy, or train anew into another directory",
        ) from None


class Rows:
    """`metrics.jsonl`, to which rows are appended; each write is whole lines."""

    def __init__(self, out: Path, done: int) -> None:
        """Go on after update `done`: whatever is told of later ones, and of the end, is taken out."""
        self._file = out / METRICS
        kept = (
            [row for row in lines(self._file) if row["update"] <= done and not row.get("final")]
            if done
            else []
        )
        whole.write(self._file, "".join(json.dumps(row) + "\n" for row in kept))

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows: all of them, or none and MachineError where the disk does not take them."""
        told = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        try:
            with self._file.open("ab", buffering=0) as stream:
                before, left = stream.tell(), told.encode()
                try:
                    # A disk that is almost full takes a part, and says so only by how much it took.
                    while left:
                        left = left[stream.write(left) or 0 :]
                except OSError:
                    stream.truncate(before)
                    raise
        except OSError as error:
            raise self._failed(error) from None

    def settle(self) -> None:
        """Wait until the disk has all rows: a checkpoint must not be there before what led to it."""
        try:
            with self._file.open("rb") as stream:
                os.fsync(stream.fileno())
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> MachineError:
        return MachineError(
            f"{self._file} cannot be written: {error.strerror}", "free space there and repeat with --resume"
        )


def lines(file: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a last line that a kill tore is left out. Raises UserError for another that is no row."""
    if not file.is_file():
        return []
    whole = enumerate(file.read_bytes().split(b"\n")[:-1], start=1)
    return [_row(line, f"{file} line {number}") for number, line in whole if line.strip()]


def _row(line: bytes, origin: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("update"), int):
        raise UserError(f"{origin} is no row of a training's metrics", "take the line out, and repeat")
    return row
