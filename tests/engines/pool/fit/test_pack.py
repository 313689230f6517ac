"""The sizes of a pack are those of the pack's own step: its arena, and what its decoder keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pool.base import base, loading
from coresident.engines.pool.base import writer as float_writer
from coresident.engines.pool.fit import forward
from coresident.engines.pool.fit.architecture import of
from coresident.engines.pool.fit.heap import Heap
from coresident.engines.pool.fit.pack import Pack
from coresident.engines.pool.learning import model as models
from coresident.engines.pool.learning.tokenized import Batch
from coresident.engines.pool.packed.arena import Arena
from coresident.engines.pool.packed.policy import Policy
from coresident.engines.pool.packed.rows import pack
from coresident.engines.pool.packed.written import Written
from coresident.engines.pool.parameters import DPO

LEARNERS = 3
ROWS = forward.Rows(4, 64, 192)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("bases") / "tiny"
    float_writer.write("tiny", "float32", 0, where)
    return where


def batch() -> Batch:
    ids = torch.randint(0, 500, (ROWS.sequences, ROWS.width), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    return Batch(ids, mask, mask, torch.arange(ROWS.scored), ids.flatten()[: ROWS.scored], ids.numel())


def tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, list | tuple):
        for one in found:
            yield from tensors(one)


def bytes_of(found: Any, known: set[int]) -> int:
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors(found)}
    return sum(size for place, size in storages.items() if place not in known)


@pytest.mark.parametrize("products", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_what_a_pack_holds_and_keeps(
    directory: Path, products: str, checkpointing: bool, optimizer: str
) -> None:
    settings = DPO.model_validate(
        {
            "sharing": "packed",
            "dtype": "bfloat16",
            "rank": 8,
            "adapter_products": products,
            "checkpointing": checkpointing,
            "optimizer": optimizer,
            "learners": LEARNERS,
        }
    )
    model = models.build_on_meta(directory, settings)
    models.attach(model, loading.private(base.read(directory), settings.dtype), settings)
    policy = Policy(model)
    kind = torch.bfloat16 if products == "bfloat16" else torch.float32
    arena = Arena(
        policy.layers, [8] * LEARNERS, torch.float32, kind, torch.device("cpu"), optimizer == "adamw8bit"
    )
    written = Written(policy, arena, [settings] * LEARNERS, torch.ones(LEARNERS, dtype=torch.bool))
    rows = pack([batch()] * LEARNERS)
    written.at(rows)
    own = {value.untyped_storage().data_ptr() for value in [*model.parameters(), *model.buffers()]}
    _, kept = written.decoder.forward(rows, keep=True)

    heap = Heap()
    foretold = Pack(of(base.read(directory).config, "here"), settings, False, LEARNERS, heap)
    foretold.start(0)
    held = sum(heap.held[name] for name in (forward.ADAPTER, forward.OPTIMIZER, forward.GRADIENTS))
    arenas = bytes_of([arena.masters, arena.moments, arena.work, arena.grads], set())
    assert held == pytest.approx(arenas, rel=0.01)
    before = sum(heap.held.values())
    every = forward.Rows(1, LEARNERS * ROWS.tokens, LEARNERS * ROWS.scored)
    foretold.forward(every, graph=True)
    # What the loss keeps is not the decoder's; the sums of attention's exponentials are, in a graph of their own.
    loss = every.scored * (4 + 64 * 2)
    real = bytes_of(kept, own) + (0 if checkpointing else 2 * every.tokens * 4 * 4)
    assert sum(heap.held.values()) - before - loss == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_after_a_step_nothing_of_it_is_held(directory: Path, checkpointing: bool) -> None:
    settings = DPO(sharing="packed", dtype="bfloat16", checkpointing=checkpointing)
    heap = Heap()
    process = Pack(of(base.read(directory).config, "here"), settings, True, LEARNERS, heap)
    process.start(1 << 20)
    before = dict(heap.held)
    for width in (64, 128):
        process.step(forward.Rows(4, width, 3 * width))
    assert {name: heap.held[name] for name in heap.held if heap.held[name]} == before
