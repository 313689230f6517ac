"""A training's state, from which it goes on as if it had never stopped.

`checkpoints/update-N/` holds `model.safetensors` (the weights), `optimiser.safetensors` (moments and step counts) and
`state.json` (where the training is, which recipe it belongs to, and both files' sizes and checksums). Nothing of it can run
code. The directory is written aside, made durable and renamed, and older ones are removed only then: there is always a whole one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coresident import whole
from coresident.engines.pretrain import recipe
from coresident.engines.pretrain.directory import CHECKPOINTS
from coresident.errors import MachineError, UserError

if TYPE_CHECKING:
    from torch import Tensor

    from coresident.model.shape import ModelShape

T = TypeVar("T")
MODEL, OPTIMISER, STATE = "model.safetensors", "optimiser.safetensors", "state.json"
VERSION = 1
_PREFIX, _ASIDE = "update-", ".writing-"


@dataclass(frozen=True)
class Position:
    """Where a training is: after `update` updates, `blocks` blocks and `targets` targets, with the data's `cursor`;
    `training_seconds` without and `elapsed_seconds` with validation and checkpoints, over all sessions.
    """

    update: int = 0
    blocks: int = 0
    targets: int = 0
    cursor: Mapping[str, Any] | None = None
    training_seconds: float = 0.0
    elapsed_seconds: float = 0.0


@dataclass(frozen=True)
class Content:
    """What is in a file: how many bytes, and their SHA-256 (hex)."""

    size: int
    sha256: str

    @classmethod
    def of(cls, file: Path) -> Content:
        """That of a file on disk, which is read once."""
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            return cls(stream.tell(), digest)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, with all but its tensors read. `files` says what was written into each file of tensors; an old
    checkpoint does not.
    """

    place: Path
    position: Position
    identity: Mapping[str, str]
    files: Mapping[str, Content]


def save(
    out: Path,
    position: Position,
    identity: Mapping[str, str],
    model: Mapping[str, Tensor],
    optimiser: Mapping[str, Tensor],
    keep: bool,
) -> None:
    """Publish a checkpoint, and unless `keep` remove the older ones. Raises MachineError where it cannot be written; what
    was there then stays.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = out / CHECKPOINTS
    place, aside = folder / f"{_PREFIX}{position.update:08d}", folder / f"{_ASIDE}{os.getpid()}"
    if place.is_dir():
        return
    try:
        folder.mkdir(exist_ok=True)
        aside.mkdir()
        with ThreadPoolExecutor() as pool:
            # Hashed while the next is written and while the disk takes them: they still lie in the page cache.
            contents = {}
            for name, tensors in ((MODEL, model), (OPTIMISER, optimiser)):
                save_file(
                    {key: one.detach().cpu().contiguous() for key, one in tensors.items()}, aside / name
                )
                contents[name] = pool.submit(Content.of, aside / name)
            for name in contents:
                whole.sync(aside / name)
        state = {
            "version": VERSION,
            "identity": dict(identity),
            "position": asdict(position),
            "files": {name: asdict(content.result()) for name, content in contents.items()},
        }
        (aside / STATE).write_text(json.dumps(state, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        for name in (STATE, "."):
            whole.sync(aside / name)
        aside.rename(place)
        whole.sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise MachineError(
            f"the checkpoint {place} cannot be written: {' '.join(str(error).split())}",
            "free space there and repeat with --resume: the one before is kept"
            if found(out)
            else "free space there and repeat with --resume, which begins anew: no earlier one is kept",
        ) from error
    if not keep:
        for older in found(out):
            if older != place:
                shutil.rmtree(older, ignore_errors=True)


def found(out: Path) -> list[Path]:
    """The checkpoints of a training, oldest first."""
    return sorted(one for one in (out / CHECKPOINTS).glob(f"{_PREFIX}*") if (one / STATE).is_file())


def clear_unfinished(out: Path) -> None:
    """Remove what a crash left half written or half removed. Only for the process that holds the directory."""
    complete = found(out)
    for pattern in (_ASIDE, _PREFIX):
        for one in (out / CHECKPOINTS).glob(f"{pattern}*"):
            if one not in complete:
                shutil.rmtree(one, ignore_errors=True)


def latest(out: Path) -> Checkpoint | None:
    """The newest checkpoint, or None. Raises UserError for one that cannot be read."""
    places = found(out)
    if not places:
        return None
    file = places[-1] / STATE
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        if told["version"] != VERSION:
            raise UserError(
                f"{file} has version {told['version']}, and this program reads version {VERSION}",
                "use the version of coresident that wrote it",
            )
        position, identity = Position(**told["position"]), dict(told["identity"])
        _check_sound(position)
        files = {name: Content(**one) for name, one in dict(told.get("files", {})).items()}
        return Checkpoint(places[-1], position, identity, files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} cannot be used: {' '.join(str(error).split())}",
            _without(places[-1]),
        ) from None


def _check_sound(position: Position) -> None:
    """Raise ValueError for what no training was ever at: going on from it would read other data, or none."""
    counts = (position.update, position.blocks, position.targets)
    seconds = (position.training_seconds, position.elapsed_seconds)
    if (
        any(type(one) is not int or one < 0 for one in counts)
        or any(not isinstance(one, int | float) or one < 0 for one in seconds)
        or not isinstance(position.cursor, dict)
    ):
        raise ValueError("its position is none")


def _without(damaged: Path) -> str:
    """What to do without a checkpoint that is damaged."""
    before = [one for one in found(damaged.parent.parent) if one.name < damaged.name]
    if before:
        return f"remove {damaged} to go on from {before[-1].name}"
    return f"no earlier one is kept: put {damaged} back from a copy, or remove it, and `train --resume` begins anew"


def settled(out: Path, read: Callable[[], T]) -> T:
    """What `read` gives of the newest checkpoint; read again where a training that still goes on replaced it meanwhile."""
    while True:
        newest = found(out)[-1:]
        try:
            return read()
        except UserError:
            if found(out)[-1:] == newest:
                raise


def check_belongs(checkpoint: Checkpoint, identity: Mapping[str, str]) -> None:
    """Raise UserError, which names the first difference, where a checkpoint is of another recipe."""
    differing = recipe.differences(checkpoint.identity, identity)
    if differing:
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise UserError(
            f"{checkpoint.place} is of another recipe: {differing[0]}{more}",
            "set it back to go on, or choose another --out to start anew",
        )


def tensors(
    checkpoint: Checkpoint, name: str, expected: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The tensors of the file `name`, on the host. Raises UserError if it is damaged, or if names or shapes are not those
    of `expected`.
    """
    from safetensors.torch import load_file

    with _as_written(checkpoint, name) as file:
        stored: dict[str, Tensor] = load_file(file)
    if expected is not None:
        _compare(file, _sizes(stored), _sizes(expected))
    return stored


def check_whole(checkpoint: Checkpoint, name: str, shape: ModelShape) -> None:
    """Raise UserError where a file of a checkpoint is damaged, or not of the model `shape`. No tensor is made of it."""
    import torch
    from safetensors import safe_open

    from coresident.model.llama import Llama

    with _as_written(checkpoint, name) as file, safe_open(file, "pt") as stored:
        there = {key: tuple(stored.get_slice(key).get_shape()) for key in stored.keys()}  # noqa: SIM118
    with torch.device("meta"):
        _compare(file, there, _sizes(Llama(shape).state_dict()))


@contextlib.contextmanager
def _as_written(checkpoint: Checkpoint, name: str) -> Iterator[Path]:
    """A file of a checkpoint, to be read in here. Raises UserError if it is not what was written, or cannot be read."""
    from safetensors import SafetensorError

    file = checkpoint.place / name
    try:
        _check_content(file, checkpoint.files.get(name))
        yield file
    except (OSError, SafetensorError, RuntimeError) as error:
        # PyTorch, which maps the file, has only RuntimeError for one that was removed, and for all else.
        if isinstance(error, RuntimeError) and file.is_file():
            raise
        raise UserError(
            f"{file} is damaged: {' '.join(str(error).split())}", _without(checkpoint.place)
        ) from None


def _check_content(file: Path, written: Content | None) -> None:
    """Raise OSError where a file does not hold what was written into it, as far as that was kept."""
    if written is None:
        return
    size = file.stat().st_size
    if size != written.size:
        raise OSError(f"it has {size} bytes where {STATE} says {written.size}")
    if Content.of(file) != written:
        raise OSError(f"it has another checksum than {STATE} says")


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(one.shape) for key, one in tensors.items()}


def _compare(
    file: Path, stored: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    for key in sorted({*stored, *expected}):
        there, wanted = stored.get(key, "missing"), expected.get(key, "unknown")
        if there != wanted:
            raise UserError(
                f"{file} is of another model: {key} is {there} there and {wanted} here",
                "give the recipe that it was trained with",
            )
