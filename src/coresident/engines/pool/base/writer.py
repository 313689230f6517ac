"""Writes a named base once: seeded random weights, `config.json` and a tokenizer, as any Hugging Face
directory.

`python -m coresident.engines.pool.base.writer SHAPE DTYPE SEED DIRECTORY`

Tensor by tensor, each from its own name and the seed, so that several threads draw at once and the bytes are the same;
a base of 15 GB needs the memory of a few of its largest tensors. Two processes at once are safe: one writes, the
other waits and finds it done. A killed writer leaves a directory aside that the next one sweeps.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from filelock import FileLock

from coresident.engines.pool.base import shapes
from coresident.engines.pool.base.base import INDEX, SINGLE
from coresident.engines.pool.base.tensors import WIDTH, encode_header

if TYPE_CHECKING:
    import torch

SHARD = 4 << 30
# Drawing normal numbers takes a core 15 times as long as writing them: this many at once, as far as there are cores.
THREADS = 16


def write(shape: str, dtype: str, seed: int, where: Path, shard: int = SHARD) -> None:
    """Make sure that the base is in `where`. The same arguments always give the same bytes."""
    once(where, lambda aside: _fill(shape, dtype, seed, aside, shard))


def once(where: Path, fill: Callable[[Path], None]) -> None:
    """Make sure that the directory `where` is there: `fill` writes it aside, whole, in one process of all that ask."""
    where.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(where.parent / f"{where.name}.lock"):
        # Whoever holds the lock is the only writer: what lies aside was left by one that was killed.
        for stale in where.parent.glob(f".{where.name}.aside-*"):
            shutil.rmtree(stale)
        if where.is_dir():
            return
        aside = where.parent / f".{where.name}.aside-{os.getpid()}"
        aside.mkdir()
        try:
            fill(aside)
            aside.rename(where)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise


def _fill(shape: str, dtype: str, seed: int, into: Path, shard: int) -> None:
    config = dict(shapes.SHAPES[shape]) | {"dtype": dtype}
    write_tokenizer(shapes.TOKENS.get(shape, shapes.TOKENS_OTHERWISE), into)
    (into / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    parts = list(_parts(list(shapes.weights(config)), WIDTH[dtype], shard))
    names = (
        [SINGLE]
        if len(parts) == 1
        else [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    )
    for name, part in zip(names, parts, strict=True):
        with (into / name).open("wb") as stream:
            stream.write(encode_header((weight.name, dtype, weight.shape) for weight in part))
            for tensor in _drawn(part, dtype, seed):
                _write_tensor(stream, tensor)
            stream.flush()
            os.fsync(stream.fileno())
    if len(parts) > 1:
        placed = {weight.name: name for name, part in zip(names, parts, strict=True) for weight in part}
        total = sum(weight.elements for part in parts for weight in part) * WIDTH[dtype]
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (into / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(tokens: int, into: Path) -> None:
    """A byte-level BPE of at most `tokens` tokens, trained on Python's own documentation: nothing is
    downloaded.
    """
    from coresident.text import pythondocs, tokenizer

    tokenizer.train_byte_bpe(pythondocs.corpus(), tokens, into)


def _parts(weights: Sequence[shapes.Weight], width: int, limit: int) -> Iterator[list[shapes.Weight]]:
    part: list[shapes.Weight] = []
    size = 0
    for weight in weights:
        if part and size + weight.elements * width > limit:
            yield part
            part, size = [], 0
        part.append(weight)
        size += weight.elements * width
    yield part


def _drawn(weights: Sequence[shapes.Weight], dtype: str, seed: int) -> Iterator[torch.Tensor]:
    """Every tensor in the order of `weights`, a few of them drawn ahead in threads: torch lets go of the interpreter."""
    threads = min(THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[torch.Tensor]] = deque()
        for weight in weights:
            ahead.append(pool.submit(draw, weight, dtype, seed))
            if len(ahead) > threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def draw(weight: shapes.Weight, dtype: str, seed: int) -> torch.Tensor:
    """The tensor's values, shape `weight.shape`: from its own name and the seed, so that no other tensor
    matters.
    """
    import torch

    kind = getattr(torch, dtype)
    if weight.kind != "normal":
        return torch.full(weight.shape, 1.0 if weight.kind == "ones" else 0.0, dtype=kind)
    named = hashlib.sha256(f"{seed}/{weight.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(named[:8], "little") >> 1)
    return torch.empty(weight.shape).normal_(0.0, 0.02, generator=generator).to(kind)


def _write_tensor(stream: BinaryIO, tensor: torch.Tensor) -> None:
    import torch

    stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


if __name__ == "__main__":
    write(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
