"""The sizes of a plain step of a pack are those of the step itself: what autograd keeps of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pool.base import base, loading
from coresident.engines.pool.fit import forward
from coresident.engines.pool.fit.architecture import Architecture, of
from coresident.engines.pool.fit.heap import Heap
from coresident.engines.pool.fit.plain_pack import PlainPack
from coresident.engines.pool.fit.predict import Predictor
from coresident.engines.pool.fit.step import Learner
from coresident.engines.pool.fit.together import Together, as_they_are
from coresident.engines.pool.learning import model as models
from coresident.engines.pool.learning.tokenized import Batch
from coresident.engines.pool.packed.arena import Arena
from coresident.engines.pool.packed.policy import Policy
from coresident.engines.pool.packed.rows import pack
from coresident.engines.pool.packed.step import Step
from coresident.engines.pool.parameters import DPO

LEARNERS = 3
SEQUENCES, WIDTH, SCORED = 4, 64, 192


def batch(short: int) -> Batch:
    """`short`: how many tokens the last sequence lacks."""
    ids = torch.randint(0, 500, (SEQUENCES, WIDTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[-1, WIDTH - short :] = 0
    return Batch(ids, mask, mask, torch.arange(SCORED), ids.flatten()[:SCORED], int(mask.sum()))


def together(short: int) -> Together:
    tokens = SEQUENCES * WIDTH - short
    return Together(LEARNERS * tokens, LEARNERS * SCORED, LEARNERS * SEQUENCES, WIDTH, not short)


@pytest.mark.parametrize(
    ("dtype", "products"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
@pytest.mark.parametrize("short", [0, 16], ids=["whole", "padded"])
def test_what_is_kept_for_the_backward_pass_is_what_autograd_keeps(
    directory: Path, dtype: str, products: str, short: int, kept_by_autograd: Any
) -> None:
    settings = DPO.model_validate(
        {"sharing": "packed", "dtype": dtype, "rank": 8, "adapter_products": products, "learners": LEARNERS}
    )
    model = models.build_on_meta(directory, settings)
    models.attach(model, loading.private(base.read(directory), dtype), settings)
    policy = Policy(model)
    kind = torch.bfloat16 if products == "bfloat16" else torch.float32
    arena = Arena(policy.layers, [8] * LEARNERS, torch.float32, kind, torch.device("cpu"))
    step = Step(policy, arena, [settings] * LEARNERS, torch.ones(LEARNERS, dtype=torch.bool))
    rows = pack([batch(short)] * LEARNERS)
    step.at(rows)
    given = [*model.parameters(), *model.buffers(), arena.work, arena.grads, *rows.tensors.values()]
    real = kept_by_autograd(lambda: policy.score(rows), given)

    foretold = PlainPack(
        of(base.read(directory).config, "here"), settings, nf4=False, learners=LEARNERS, heap=Heap()
    )
    foretold.start(0)
    before = sum(foretold.heap.held.values())
    foretold.together = together(short)
    foretold.forward(forward.Rows(1, foretold.together.tokens, foretold.together.scored), graph=True)
    assert sum(foretold.heap.held.values()) - before == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_keeps_for_each_learner_what_it_keeps_alone(directory: Path, deterministic: bool) -> None:
    settings = DPO(sharing="packed", dtype="bfloat16", deterministic=deterministic)
    shape = of(base.read(directory).config, "here")
    alone = Learner(shape, settings, False, Heap())
    kept = alone.forward(forward.Rows(SEQUENCES, WIDTH, SCORED), graph=True)
    all_of_them = PlainPack(shape, settings, False, LEARNERS, Heap())
    all_of_them.together = together(0)
    theirs = all_of_them.forward(
        forward.Rows(1, all_of_them.together.tokens, all_of_them.together.scored), graph=True
    )
    one, every = (sum(block.asked for block in found[1]["attention"]) for found in (kept, theirs))
    assert every == LEARNERS * one


@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_after_its_steps_nothing_of_them_is_held(directory: Path, checkpointing: bool, nf4: bool) -> None:
    settings = DPO(sharing="packed", dtype="bfloat16", checkpointing=checkpointing, optimizer="adamw8bit")
    process = PlainPack(of(base.read(directory).config, "here"), settings, nf4, LEARNERS, Heap())
    process.start(1 << 20)
    before = dict(+process.heap.held)
    process.steps([together(0), together(16)])
    process.heap.held[forward.WORKSPACES] -= forward.WORKSPACE  # the backward pass's, which stays
    assert dict(+process.heap.held) == before


def test_its_steps_are_those_of_all_learners_together() -> None:
    one, other = forward.Rows(4, 10, 20), forward.Rows(2, 30, 25, 5)
    found = as_they_are([[one, one], [other, other, other]], 3, DPO(sharing="packed", learners=3, steps=6))
    # The third learner is like the first.
    assert found == [Together(40 + 55 + 40, 20 + 25 + 20, 10, 30, False)] * 2


@pytest.mark.parametrize(
    ("step", "normed", "plain"),
    [("eager", False, True), ("captured", False, False), ("auto", False, False), ("auto", True, True)],
)
def test_it_is_foretold_where_it_is_what_runs(step: str, normed: bool, plain: bool) -> None:
    shape = Architecture(2, 512, 512, 256, 8, 2048, 4096, normed=normed)
    settings = DPO(sharing="packed", step=step, learners=3)
    rows = [[forward.Rows(4, 512, 1024)] * 6]

    def total(settings: DPO, shape: Architecture) -> int:
        return Predictor(settings, shape, 1 << 20, False, rows).at(3).total

    as_plain = total(settings.model_copy(update={"step": "eager"}), shape)
    assert (total(settings, shape) == as_plain) is plain
