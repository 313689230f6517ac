"""The sizes of a step are those of the learner's own step: what autograd really keeps, what a learner really has, and what
it really takes at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pool.base import base, loading, shapes
from coresident.engines.pool.base import writer as float_writer
from coresident.engines.pool.fit import forward, step
from coresident.engines.pool.fit.architecture import Architecture, of
from coresident.engines.pool.fit.heap import Heap
from coresident.engines.pool.learning import model as models
from coresident.engines.pool.learning.learner import Learner
from coresident.engines.pool.learning.scoring import Scorer
from coresident.engines.pool.learning.tokenized import Batch
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.quantised import writer

# Wide enough that what a CPU's products need besides is little.
WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny shape, as floats and in 4 bits, and a wide one."""
    where = tmp_path_factory.mktemp("bases")
    float_writer.write("tiny", "float32", 0, where / "none")
    writer.write_from(where / "none", where / "nf4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(shapes.SHAPES, "wide", {**shapes.SHAPES["tiny"], **WIDE})
        float_writer.write("wide", "float32", 0, where / "wide")
    return {name: where / name for name in ("none", "nf4", "wide")}


def batch(rows: forward.Rows) -> Batch:
    ids = torch.randint(0, 500, (rows.sequences, rows.width), generator=torch.Generator().manual_seed(0))
    places = torch.arange(rows.scored)
    return Batch(
        ids, torch.ones_like(ids), torch.ones_like(ids), places, ids.flatten()[: rows.scored], ids.numel()
    )


def attached(directory: Path, settings: DPO) -> Any:
    model = models.build_on_meta(directory, settings)
    models.attach(model, loading.private(base.read(directory), settings.dtype), settings)
    return model


ROWS = forward.Rows(4, 64, 192)


@pytest.mark.parametrize("quantise", ["none", "nf4"])
@pytest.mark.parametrize(
    ("dtype", "products"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_is_kept_for_the_backward_pass_is_what_autograd_keeps(
    bases: dict[str, Path],
    quantise: str,
    dtype: str,
    products: str,
    checkpointing: bool,
    kept_by_autograd: Any,
) -> None:
    settings = DPO.model_validate(
        {"dtype": dtype, "rank": 8, "checkpointing": checkpointing, "adapter_products": products}
    )
    model = attached(bases[quantise], settings)
    if checkpointing:
        from coresident.engines.pool.learning.checkpointing import checkpoint_layers

        checkpoint_layers(model)
    scorer = Scorer.of(model)
    real = kept_by_autograd(lambda: scorer.score(batch(ROWS)), [*model.parameters(), *model.buffers()])
    heap = Heap()
    process = step.Learner(of(base.read(bases[quantise]).config, "here"), settings, quantise == "nf4", heap)
    process.forward(ROWS, graph=True)
    foretold = sum(heap.held.values())
    if checkpointing:
        # The angles are the checkpointed layers' arguments, which no hook sees.
        real += 2 * ROWS.width * 16 * forward.WIDTHS[dtype]
    assert foretold == pytest.approx(real, rel=0.02), (foretold, real)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_between_two_steps_a_learner_holds_its_adapter_and_its_optimiser(
    bases: dict[str, Path], optimizer: str
) -> None:
    settings = DPO.model_validate({"rank": 64, "optimizer": optimizer, "loss": "sft"})
    model = attached(bases["none"], settings)
    learner = Learner(model, [batch(ROWS)], settings)
    learner.step()
    adapter = sum(value.numel() * 4 for value in model.parameters() if value.requires_grad)
    states = sum(
        value.numel() * value.element_size()
        for state in learner.optimizer.state.values()
        for value in state.values()
        if value.dim()
    )
    heap = Heap()
    process = step.Learner(of(base.read(bases["none"]).config, "here"), settings, False, heap)
    process.start(0)
    process.step(ROWS)
    assert heap.held[forward.ADAPTER] == adapter
    assert heap.held[forward.OPTIMIZER] == pytest.approx(states, rel=0.1)
    assert heap.held[forward.WORKSPACES] == 2 * forward.WORKSPACE
    rest = {
        kind: heap.held[kind]
        for kind in forward.KINDS
        if kind not in (forward.ADAPTER, forward.OPTIMIZER, forward.WORKSPACES)
    }
    assert not any(rest.values()), rest


def most_allocated(run: Callable[[], Any]) -> int:
    """Bytes beyond what there was, every operation's own temporaries included, as PyTorch's allocator was asked for them."""
    from torch.profiler import ProfilerActivity, profile

    # Without oneDNN, which on some processors brings bfloat16 matrices into another order first, in memory of its own.
    plain = torch.backends.mkldnn.flags(enabled=False)  # type: ignore[no-untyped-call]
    with plain, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    found = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [int(event.nbytes()) for event in sorted(found, key=lambda event: event.start_ns())]
    return max(accumulate(sizes))


# AdamW with all its bits is one kernel on a card and is not on a CPU, but asks for less than the backward pass.
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_takes_at_most_what_a_learners_step_really_takes(
    bases: dict[str, Path], optimizer: str, checkpointing: bool
) -> None:
    values = {"dtype": "bfloat16", "adapter_products": "bfloat16", "rank": 32}
    settings = DPO.model_validate(values | {"optimizer": optimizer, "checkpointing": checkpointing})
    rows = forward.Rows(4, 16, 16)
    model = attached(bases["wide"], settings)
    learner = Learner(model, [batch(rows), batch(rows)], settings)
    learner.step()
    real = most_allocated(learner.step)
    heap = Heap()
    process = step.Learner(of(base.read(bases["wide"]).config, "here"), settings, False, heap)
    process.start(0)
    process.step(rows)
    before = sum(heap.held.values())
    heap.fullest, heap._most = Counter(), 0
    process.step(rows)
    foretold = sum(heap.fullest.values()) - before
    assert foretold == pytest.approx(real, rel=0.02), (foretold, real)


SHAPE = Architecture(2, 64, 64, 32, 4, 128, 512, normed=False)


def most(
    rows: forward.Rows = ROWS, nf4: bool = False, shape: Architecture = SHAPE, **values: Any
) -> dict[str, int]:
    settings = DPO.model_validate({"dtype": "bfloat16", "rank": 8} | values)
    heap = Heap()
    process = step.Learner(shape, settings, nf4, heap)
    process.start(0)
    process.step(rows)
    return dict(heap.fullest)


def test_what_makes_a_step_larger() -> None:
    plain = sum(most().values())
    assert sum(most(checkpointing=True).values()) < plain
    assert sum(most(forward.Rows(4, 128, 192)).values()) > plain
    assert sum(most(rank=64).values()) > plain
    assert sum(most(targets=["q_proj"]).values()) < plain
    assert sum(most(deterministic=True).values()) > plain
    # Whether the reference is worked out in the step does not: it is over before the policy's pass begins.
    assert sum(most(reference="precomputed").values()) == plain


def test_a_second_size_of_chunk_is_reserved_beside_the_first() -> None:
    shape = Architecture(2, 64, 64, 32, 4, 128, 151936, normed=False)
    settings = DPO(dtype="bfloat16")
    heap = Heap()
    process = step.Learner(shape, settings, False, heap)
    process.start(0)
    process.step(forward.Rows(4, 256, 960))
    before = heap.reserved
    process.step(forward.Rows(4, 256, 980))
    # Chunks of 384 rows instead of 320: no block is large enough for their tables.
    assert heap.reserved - before > 400 << 20


def test_four_bits_need_one_weight_at_a_time() -> None:
    shape = Architecture(1, 512, 512, 128, 4, 2048, 512, normed=False)
    few = forward.Rows(2, 8, 8)
    nf4, plain = most(few, nf4=True, shape=shape, rank=1), most(few, shape=shape, rank=1)
    weight = 512 * 2048 * 2
    assert 0.9 * weight < sum(nf4.values()) - sum(plain.values()) <= weight


def test_a_backward_pass_keeps_its_place_for_weights() -> None:
    """Else gradients would lie where the last one was, and the next find no room."""
    settings = DPO(dtype="bfloat16", checkpointing=True, adapter_products="bfloat16", optimizer="adamw8bit")
    heap = Heap()
    process = step.Learner(of(shapes.SHAPES["qwen2.5-7b"], "here"), settings, True, heap)
    process.start(0)
    for _ in range(3):
        process.step(forward.Rows(4, 22, 22))
    assert heap.reserved < 1.1 * sum(heap.fullest.values())
