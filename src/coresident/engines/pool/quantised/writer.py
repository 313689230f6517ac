"""Writes a 4-bit base once, in bitsandbytes' format: from a float base, or a named shape's random one.

`python -m coresident.engines.pool.quantised.writer SHAPE_OR_DIRECTORY DTYPE SEED DIRECTORY`

A float base is quantised on the processor, the same bytes wherever that is done; what is not a linear layer keeps the
type it has. A named shape's indices are drawn as they are, uniformly, with scales that make the weights' standard
deviation that of the float shape: to draw floats first would take ten times as long and say nothing more.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coresident.engines.pool.base import shapes, writer
from coresident.engines.pool.base.base import INDEX, SINGLE, BaseDir, read
from coresident.engines.pool.quantised import blockwise, checkpoint, names, nf4
from coresident.engines.pool.quantised.sizes import STATE_BYTES, quantisable
from coresident.errors import CoresidentError, UserError

if TYPE_CHECKING:
    from torch import Tensor

SHARD = 1 << 30
DEVIATION = 0.02
Tensors = dict[str, "Tensor"]


def write_named(shape: str, dtype: str, seed: int, where: Path, shard: int = SHARD) -> None:
    """Make sure that the 4-bit base of this shape is in `where`, its other tensors in `dtype`. The same arguments always
    give the same bytes.
    """

    def one(weight: shapes.Weight) -> Tensors:
        if not quantisable(weight.name, weight.shape):
            return {weight.name: writer.draw(weight, dtype, seed)}
        return tensors(weight.name, drawn(weight, seed), dtype)

    def fill(aside: Path) -> None:
        config = dict(shapes.SHAPES[shape]) | {"dtype": dtype, "quantization_config": checkpoint.config()}
        writer.write_tokenizer(shapes.TOKENS.get(shape, shapes.TOKENS_OTHERWISE), aside)
        _write_json(aside / "config.json", config)
        _write(aside, _ahead(one, shapes.weights(config)), shard)

    writer.once(where, fill)


def write_from(directory: Path, where: Path, shard: int = SHARD) -> None:
    """Make sure that a 4-bit copy of the float base in `directory` is in `where`. Raises UserError for a base without
    linear layers in its decoder.
    """

    def fill(aside: Path) -> None:
        base = read(directory)
        layers = linear_layers(directory)
        if not any(stored.name in layers for stored in base.tensors):
            raise UserError(f"{directory} has no linear layers to quantise", "set base.quantise: none")
        for file in directory.iterdir():
            if file.is_file() and file.suffix in (".json", ".model", ".txt", ".jinja") and file.name != INDEX:
                shutil.copyfile(file, aside / file.name)
        _write_json(aside / "config.json", dict(base.config) | {"quantization_config": checkpoint.config()})
        _write(aside, _quantised(base, layers), shard)

    writer.once(where, fill)


def linear_layers(directory: Path) -> frozenset[str]:
    """The names, as files have them, of the weights that are quantised: those of every linear layer but the output
    layer, as transformers chooses them.
    """
    import torch
    from torch import nn

    from coresident.engines.pool.learning.model import base_on_meta

    model: Any = base_on_meta(directory, torch.bfloat16)
    head = model.get_output_embeddings()
    names = [
        name for name, module in model.named_modules() if type(module) is nn.Linear and module is not head
    ]
    prefix = f"{model.base_model_prefix}."
    return frozenset(f"{name}.weight" for name in [*names, *(name.removeprefix(prefix) for name in names)])


def tensors(name: str, held: nf4.Quantised, dtype: str) -> Tensors:
    """What a file holds of the quantised weight `name`, which was a `dtype` one."""
    import torch

    state = checkpoint.state(held.form, dtype)
    if len(state) > STATE_BYTES:
        raise ValueError(f"{name}: a state of {len(state)} bytes")
    # Spaces end it: the size is then the same whatever the numbers, and JSON does not mind.
    text = torch.frombuffer(bytearray(state.ljust(STATE_BYTES)), dtype=torch.uint8)
    parts = {part: getattr(held, part) for part in held.form.sizes if part != "weight"}
    return {
        name: held.weight,
        **{f"{name}.{part}": value.clone() for part, value in parts.items()},
        f"{name}{names.STATE}": text,
    }


def drawn(weight: shapes.Weight, seed: int) -> nf4.Quantised:
    """A random 4-bit weight from its own name and the seed, with a standard deviation of `DEVIATION`."""
    import torch

    named = hashlib.sha256(f"nf4/{seed}/{weight.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(named[:8], "little") >> 1)
    table, nested_map = torch.tensor(nf4.VALUES), blockwise.dynamic_map(signed=True)
    rows, columns = weight.shape
    form = nf4.Form(
        (rows, columns), nf4.BLOCK, DEVIATION / float(table.square().mean().sqrt()), nf4.NESTED_BLOCK
    )
    assert form.offset is not None
    sizes = form.sizes

    def indices(part: str) -> Tensor:
        # Eight bytes a draw: a draw takes as long whatever its size.
        count = -(-sizes[part][0] // 8)
        words = torch.empty(count, dtype=torch.int64).random_(-(2**63), None, generator=generator)
        return words.view(torch.uint8)[: sizes[part][0]].clone()

    packed = indices("weight").unsqueeze(1)
    # A tenth: real blocks' magnitudes differ by about so much.
    nested = torch.full(sizes["nested_absmax"], form.offset / 10)
    return nf4.Quantised(form, packed, indices("absmax"), table, nested, nested_map)


def _quantised(base: BaseDir, layers: frozenset[str]) -> Iterator[Tensors]:
    from safetensors import safe_open

    for file in base.files:
        with safe_open(file, framework="pt") as opened:
            for stored in base.tensors:
                if stored.file == file:
                    tensor = opened.get_tensor(stored.name)
                    if stored.name in layers:
                        yield tensors(stored.name, nf4.quantise(tensor), stored.dtype)
                    else:
                        yield {stored.name: tensor}


def _ahead(make: Callable[[shapes.Weight], Tensors], weights: Iterable[shapes.Weight]) -> Iterator[Tensors]:
    """`make` of each weight, in order, a few of them ahead in threads."""
    threads = min(writer.THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[Tensors]] = deque()
        for weight in weights:
            ahead.append(pool.submit(make, weight))
            if len(ahead) > threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _write(into: Path, groups: Iterable[Tensors], limit: int) -> None:
    """Shards of about `limit` bytes, and their index; `limit` bytes are held at a time."""
    from safetensors.torch import save_file

    placed: dict[str, int] = {}
    total = number = 0
    part: Tensors = {}
    size = 0

    def flush() -> None:
        nonlocal number, part, size
        number += 1
        file = into / f"part-{number}"
        save_file({name: value.contiguous() for name, value in part.items()}, file, metadata={"format": "pt"})
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        placed.update(dict.fromkeys(part, number))
        part, size = {}, 0

    for group in groups:
        more = sum(value.numel() * value.element_size() for value in group.values())
        if part and size + more > limit:
            flush()
        part |= group
        size += more
        total += more
    flush()
    if number == 1:
        (into / "part-1").rename(into / SINGLE)
        return
    names = {one: f"model-{one:05}-of-{number:05}.safetensors" for one in range(1, number + 1)}
    for one, name in names.items():
        (into / f"part-{one}").rename(into / name)
    weight_map = {name: names[one] for name, one in placed.items()}
    _write_json(into / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Start from the command line that `base.ensure` gives."""
    named, dtype, seed, where = arguments
    try:
        if named in shapes.SHAPES:
            write_named(named, dtype, int(seed), Path(where))
        else:
            write_from(Path(named), Path(where))
    except CoresidentError as error:
        # Whoever started this reads the last line.
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
