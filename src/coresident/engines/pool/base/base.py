"""Which files a base is: a local Hugging Face directory, or a named shape in our cache. Nothing heavy is
imported here.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coresident.engines.pool.base import shapes
from coresident.engines.pool.base.tensors import ALIGNMENT, WIDTH, Layout, Stored, converted, header, layout
from coresident.engines.pool.parameters import BaseModelChoice
from coresident.engines.pool.quantised import checkpoint, sizes
from coresident.errors import MachineError, UserError

CACHE = "CORESIDENT_CACHE"
# Raise it when the same seed would no longer write the same bytes.
WRITER_VERSION = 1

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class BaseDir:
    """A base that can be loaded: its directory, its tensors, and the type its weights are stored in.

    `dtype` is None where the stored floating types are mixed; `config` is the content of `config.json`.
    """

    path: Path
    tensors: tuple[Stored, ...]
    dtype: str | None
    config: Mapping[str, Any]

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the weights."""
        return tuple(sorted({stored.file for stored in self.tensors}))

    def layout(self, dtype: str, alignment: int = ALIGNMENT) -> Layout:
        """Where the tensors lie in one allocation, held as `dtype`."""
        return layout(self.tensors, dtype, alignment)

    def bytes(self, dtype: str) -> int:
        """What the base occupies when held as `dtype`."""
        return self.layout(dtype).size


def cache() -> Path:
    """Where named bases are kept: `$CORESIDENT_CACHE`, else `~/.cache/coresident`."""
    given = os.environ.get(CACHE)
    return Path(given) if given else Path.home() / ".cache" / "coresident"


def location(choice: BaseModelChoice, dtype: str) -> Path:
    """The directory of this base. The name of one that is written here changes with everything its bytes follow from."""
    if choice.path is not None:
        given = Path(choice.path).expanduser().absolute()
        return _quantised(given) if choice.quantise == "nf4" else given
    assert choice.config is not None
    described = json.dumps([WRITER_VERSION, shapes.SHAPES[choice.config]], sort_keys=True)
    short = hashlib.sha256(described.encode()).hexdigest()[:8]
    kind = dtype if choice.quantise == "none" else f"{dtype}-{choice.quantise}"
    return cache() / "bases" / f"{choice.config}-{kind}-seed{choice.seed}-{short}"


def source(choice: BaseModelChoice, dtype: str) -> Path:
    """Where config and tokenizer of this base can be read now: the base's directory, or the one it will be made from."""
    where = location(choice, dtype)
    return where if where.is_dir() or choice.path is None else Path(choice.path).expanduser().absolute()


def estimate(choice: BaseModelChoice, dtype: str) -> int:
    """Bytes of this base when held as `dtype`, without writing it where it is still to be written."""
    where = location(choice, dtype)
    if where.is_dir():
        return read(where).bytes(dtype)
    nf4 = choice.quantise == "nf4"
    if choice.config is not None:
        named = ((one.name, one.shape, True) for one in shapes.weights(shapes.SHAPES[choice.config]))
        return sum(sizes.held(name, shape, WIDTH[dtype], nf4) for name, shape, _ in named)
    return sum(
        sizes.held(one.name, one.shape, WIDTH[dtype if converted(one) else one.dtype], nf4)
        for one in read(source(choice, dtype)).tensors
    )


def ensure(choice: BaseModelChoice, dtype: str) -> BaseDir:
    """The base, ready to load. A named shape, or a 4-bit copy, that is not there yet is written first, by a process of
    its own.

    That process needs torch, which the caller's memory must not carry while it is being measured.
    """
    where = location(choice, dtype)
    if where.is_dir() or (choice.path is not None and choice.quantise == "none"):
        return read(where)
    room = "base" if choice.quantise == "none" else "quantised"
    if choice.path is not None:
        # Said here, where a message is one of ours.
        read(source(choice, dtype))
    named = choice.config or str(source(choice, dtype))
    argv = [
        sys.executable,
        "-m",
        f"coresident.engines.pool.{room}.writer",
        named,
        dtype,
        str(choice.seed),
        str(where),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise MachineError(
            f"the base {named} could not be written to {where}: {last}",
            f"free some space there, or set {CACHE} to a directory on another disk",
        )
    return read(where)


def _quantised(given: Path) -> Path:
    """Where the 4-bit copy of the base `given` is: itself, if it is one already."""
    directory = read(given)
    if checkpoint.quantised(directory.config):
        return given
    changed = [[file.name, (told := file.stat()).st_size, told.st_mtime_ns] for file in directory.files]
    described = json.dumps(
        [checkpoint.WRITER_VERSION, str(given), dict(directory.config), changed], sort_keys=True
    )
    short = hashlib.sha256(described.encode()).hexdigest()[:12]
    return cache() / "bases" / f"{given.name}-nf4-{short}"


def read(where: Path) -> BaseDir:
    """What the directory holds. Raises `UserError` for anything that keeps it from being a base."""
    if not where.is_dir():
        raise UserError(
            f"base.path: {where} is not a directory",
            "give a local Hugging Face model directory, already downloaded",
        )
    config = _config(where)
    tensors = _tensors(where)
    if not any((where / name).is_file() for name in TOKENIZERS):
        raise UserError(
            f"{where} has no tokenizer ({', '.join(TOKENIZERS)})",
            "copy the tokenizer's files beside the weights (tokenizer.save_pretrained)",
        )
    types = {tensor.dtype for tensor in tensors if converted(tensor)}
    return BaseDir(where, tensors, types.pop() if len(types) == 1 else None, config)


def _config(where: Path) -> Mapping[str, Any]:
    file = where / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{where} has no config.json", "give a Hugging Face model directory") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON ({error})", "fetch it again") from None
    names = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(names, list) or not any(
        str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names
    ):
        raise UserError(
            f"{file}: architectures is {names!r}, which is no causal language model",
            "use a ...ForCausalLM checkpoint",
        )
    checkpoint.check(file, config)
    return dict(config)


def _tensors(where: Path) -> tuple[Stored, ...]:
    if (where / SINGLE).is_file():
        return header(where / SINGLE)
    index = where / INDEX
    if index.is_file():
        return _sharded(where, index)
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in where.glob(pattern))
    if others:
        raise UserError(
            f"{where} holds its weights only as {others[0]}, which could run code when read",
            "convert them to safetensors: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)",
        )
    raise UserError(
        f"{where} has no weights ({SINGLE} or {INDEX})",
        "give a directory with safetensors weights, fully downloaded",
    )


def _sharded(where: Path, index: Path) -> tuple[Stored, ...]:
    try:
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(names.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index} has no readable weight_map", "fetch it again") from None
    for shard in files:
        if Path(shard).name != shard or not (where / shard).is_file():
            raise UserError(f"{index} names the shard {shard}, which is not there", "fetch the missing shard")
    found = {tensor.name: tensor for shard in files for tensor in header(where / shard)}
    for name, shard in names.items():
        if name not in found or found[name].file.name != shard:
            raise UserError(
                f"{index} places {name} in {shard}, which does not hold it", "fetch that shard again"
            )
    return tuple(found[name] for name in sorted(names))
