"""The sizes of a step of TRL's are those of PEFT's layers: what autograd really keeps of them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pool.base import base
from coresident.engines.pool.fit import forward
from coresident.engines.pool.fit.architecture import of
from coresident.engines.pool.fit.heap import Heap
from coresident.engines.pool.fit.trl_learner import TILE_COLUMNS, TILE_ROWS, TRLLearner
from coresident.engines.pool.parameters import DPO

ROWS = forward.Rows(4, 64, 192)
RANK = 8


@pytest.mark.parametrize(
    ("dtype", "products"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
def test_what_is_kept_for_the_backward_pass_is_what_autograd_keeps(
    directory: Path, dtype: str, products: str, kept_by_autograd: Any
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings = DPO.model_validate(
        {"sharing": "trl", "dtype": dtype, "rank": RANK, "adapter_products": products}
    )
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    config = LoraConfig(task_type="CAUSAL_LM", r=RANK, target_modules=list(settings.targets))
    model: Any = get_peft_model(loaded, config)
    ids = torch.randint(0, 500, (ROWS.sequences, ROWS.width), generator=torch.Generator().manual_seed(0))

    def decoded() -> None:
        with (
            torch.autocast("cpu", dtype=torch.bfloat16) if dtype == products == "bfloat16" else nullcontext()
        ):
            model.get_base_model().model(input_ids=ids, use_cache=False)

    real = kept_by_autograd(decoded, [*model.parameters(), *model.buffers()])
    process = TRLLearner(of(base.read(directory).config, "here"), settings, False, Heap())
    last = process.forward(ROWS, graph=True)[-1]
    process._drop(last, "loss")
    assert sum(process.heap.held.values()) == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("products", ["float32", "bfloat16"])
def test_between_two_steps_it_holds_its_adapter_and_its_optimiser(
    directory: Path, checkpointing: bool, products: str
) -> None:
    settings = DPO.model_validate(
        {"sharing": "trl", "dtype": "bfloat16", "adapter_products": products, "checkpointing": checkpointing}
    )
    process = TRLLearner(of(base.read(directory).config, "here"), settings, False, Heap())
    process.start(1 << 20)
    process.step(ROWS)
    after = dict(+process.heap.held)
    assert set(after) == {forward.WORKSPACES, forward.BASE, forward.ADAPTER, forward.OPTIMIZER}
    process.step(ROWS)
    assert dict(+process.heap.held) == after


def test_a_tile_of_logits_is_as_large_as_theirs() -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    from trl.kernels import chunked_logprob

    assert (TILE_ROWS, TILE_COLUMNS) == (chunked_logprob.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE)
