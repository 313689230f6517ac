"""The sizes of a pack are those of the pack's own step: its arena, and what its decoder keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pool.base import base, loading
from coresident.engines.pool.fit import forward
from coresident.engines.pool.fit.architecture import of
from coresident.engines.pool.fit.heap import Heap
from coresident.engines.pool.fit.pack import LOGITS_BUDGET, Pack
from coresident.engines.pool.fit.predict import WARM
from coresident.engines.pool.fit.together import AHEAD, Together
from coresident.engines.pool.learning import model as models
from coresident.engines.pool.learning.tokenized import Batch
from coresident.engines.pool.packed import captured
from coresident.engines.pool.packed import written as written_step
from coresident.engines.pool.packed.arena import Arena
from coresident.engines.pool.packed.policy import Policy
from coresident.engines.pool.packed.rows import pack
from coresident.engines.pool.packed.written import Written
from coresident.engines.pool.parameters import DPO

LEARNERS = 3
# Sequences, tokens, scored of one learner's batch; and whether they all have as many tokens.
BATCH = (4, 64, 192)


def batch(short: int = 0) -> Batch:
    """`short`: how many tokens the last sequence lacks."""
    sequences, width, scored = BATCH
    ids = torch.randint(0, 500, (sequences, width), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[-1, width - short :] = 0
    return Batch(ids, mask, mask, torch.arange(scored), ids.flatten()[:scored], int(mask.sum()))


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
@pytest.mark.parametrize("short", [0, 16], ids=["whole", "padded"])
def test_what_a_pack_holds_and_keeps(
    directory: Path, products: str, checkpointing: bool, optimizer: str, short: int
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
    rows = pack([batch(short)] * LEARNERS)
    written.at(rows)
    given = [*model.parameters(), *model.buffers(), *rows.tensors.values()]
    known = {value.untyped_storage().data_ptr() for value in given}
    saved: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _, kept = written.decoder.forward(rows, keep=True)
    real = bytes_of([kept, saved], known)

    own, graphs = Heap(), Heap()
    foretold = Pack(of(base.read(directory).config, "here"), settings, False, LEARNERS, own, graphs)
    foretold.start(0)
    held = sum(own.held[name] for name in (forward.ADAPTER, forward.OPTIMIZER, forward.GRADIENTS))
    arenas = bytes_of([arena.masters, arena.moments, arena.work, arena.grads], set())
    assert held == pytest.approx(arenas, rel=0.01)
    before = sum(graphs.held.values())
    sequences, width, scored = BATCH
    tokens = sequences * width - short
    every = Together(LEARNERS * tokens, LEARNERS * scored, LEARNERS * sequences, width, not short)
    hidden, _ = foretold.forward(every, keep=True)
    graphs.give(hidden)
    assert sum(graphs.held.values()) - before == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_after_a_step_nothing_of_it_is_held(
    directory: Path, checkpointing: bool, whole: bool, nf4: bool
) -> None:
    settings = DPO(sharing="packed", dtype="bfloat16", checkpointing=checkpointing, optimizer="adamw8bit")
    own, graphs = Heap(), Heap()
    process = Pack(of(base.read(directory).config, "here"), settings, nf4, LEARNERS, own, graphs)
    process.start(1 << 20)
    before = [dict(+heap.held) for heap in (own, graphs)]
    for width in (64, 128):
        process.step(Together(LEARNERS * 4 * width, LEARNERS * 3 * width, LEARNERS * 4, width, whole))
    process.finish()
    assert [dict(+heap.held) for heap in (own, graphs)] == before


def test_a_step_takes_nothing_of_the_adapters_memory(directory: Path) -> None:
    own, graphs = Heap(), Heap()
    settings = DPO(sharing="packed", dtype="bfloat16")
    process = Pack(of(base.read(directory).config, "here"), settings, False, LEARNERS, own, graphs)
    process.start(1 << 20)
    before = own.reserved, graphs.reserved
    process.step(Together(4096, 512, 12, 512, False))
    assert own.reserved == before[0]
    assert graphs.reserved > before[1]


def test_moments_in_8_bits_write_out_two_rows_of_float32(directory: Path) -> None:
    def most(optimizer: str) -> int:
        settings = DPO.model_validate(
            {"sharing": "packed", "dtype": "bfloat16", "rank": 256, "optimizer": optimizer}
        )
        graphs = Heap()
        process = Pack(of(base.read(directory).config, "here"), settings, False, 2, Heap(), graphs)
        process.start(0)
        process.step(Together(8, 4, 2, 4, True))
        assert process.row * 4 > 1 << 20, "the row is to be what is largest"
        return graphs.fullest[forward.TRANSIENTS] // (process.row * 4)

    assert (most("adamw"), most("adamw8bit")) == (0, 2)


def test_what_pack_and_step_say_too_is_the_same_here() -> None:
    from coresident.engines.pool.learning import learner

    assert LOGITS_BUDGET == written_step.BUDGET
    assert WARM == captured._WARM
    assert AHEAD == learner.AHEAD
