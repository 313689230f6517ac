"""Packs on a card: every kind of step is the plain one within rounding, and repeats itself."""

from __future__ import annotations

import json
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pool.learning import data
from coresident.engines.pool.learning.tokenized import batches, planned
from coresident.engines.pool.packed.arena import draw
from coresident.engines.pool.packed.kinds import chosen
from coresident.engines.pool.packed.pack import Pack, Plan
from coresident.engines.pool.packed.policy import Policy
from coresident.engines.pool.parameters import DPO
from coresident.text import tokenizer

pytestmark = pytest.mark.gpu

CARD = torch.device("cuda")
KINDS = ("eager", "compiled", "captured")


def settings(**values: Any) -> DPO:
    own = [
        {"rank": 4, "alpha": 8.0},
        {"rank": 8, "steps": 4, "max_length": 40, "clip": 0.2},
        {"rank": 16, "seed": 7, "batch": 3},
        {"rank": 8, "weight_decay": 0.1, "beta": 0.3},
    ]
    given = {
        "sharing": "packed", "learners": 4, "steps": 6, "max_length": 64, "data": {"pairs": 12}, "own": own,
        "learning_rate": 1e-3,
    }  # fmt: skip
    return DPO.model_validate(given | values)


@pytest.fixture
def packed(tiny_base: Any, tensors: Any, build: Any) -> Any:
    """Trains a pack on the card with a kind of step."""

    def made(asked: DPO, kind: str, masked: AbstractSet[int] = frozenset()) -> Pack:
        model = build(asked, {name: value.to(CARD) for name, value in tensors(asked.dtype).items()})
        policy = Policy(model)
        plans = []
        for number in range(asked.learners):
            own = asked.of(number)
            shard = data.tokens(own, number, tokenizer.load(tiny_base))
            start = draw(policy.layers, own.rank, own.seed)
            plans.append(Plan(own, planned(shard, own), batches(shard, own, number), start))
        pack = Pack(policy, plans, masked, kind=chosen(policy, kind))
        while not pack.over:
            pack.step()
        pack.close()
        return pack

    return made


def apart(one: Pack, other: Pack) -> float:
    worst = 0.0
    for number, adapter in other.finished.items():
        mine = torch.cat([value.double().flatten() for _, value in sorted(one.finished[number].items())])
        theirs = torch.cat([value.double().flatten() for _, value in sorted(adapter.items())])
        worst = max(worst, ((mine - theirs).norm() / theirs.norm()).item())
    return worst


@pytest.mark.parametrize("kind", ["compiled", "captured"])
@pytest.mark.parametrize(
    ("change", "close"),
    [
        ({}, 1e-4),
        ({"data": {"pairs": 12, "fill": True}, "own": []}, 1e-4),
        ({"loss": "sft"}, 1e-4),
        ({"checkpointing": True}, 1e-4),
        ({"reference": "precomputed"}, 1e-4),
        ({"optimizer": "adamw8bit"}, 1e-3),
        ({"dtype": "bfloat16", "adapter_products": "bfloat16"}, 2e-2),
    ],
    ids=str,
)
def test_a_kind_of_step_is_the_plain_one(
    packed: Any, kind: str, change: dict[str, Any], close: float
) -> None:
    asked = settings(**change)
    plain, other = packed(asked, "eager"), packed(asked, kind)
    assert other.kind == kind
    assert other.failed == plain.failed == {}
    assert apart(other, plain) <= close
    for mine, theirs in zip(other.series, plain.series, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=10 * close)
        assert mine["tokens"] == theirs["tokens"]


@pytest.fixture
def of_many_shapes(tmp_path: Path) -> DPO:
    """Four learners with alpha / r of 2 whose rows are of many lengths, all of them seen three times."""
    pairs = [
        {"prompt": "Say it " + "again " * (more // 4), "chosen": "yes " * (1 + more), "rejected": "no"}
        for more in (1, 30, 3, 14, 7, 22)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    files = {"source": "files", "files": [str(tmp_path / "pairs.jsonl")]}
    return settings(data=files, batch=1, steps=18, max_length=96, own=[{"alpha": 32.0}] * 4)


def test_what_graphs_read_lies_where_none_of_them_writes(packed: Any, of_many_shapes: DPO) -> None:
    step = packed(of_many_shapes, "captured")._step
    segments = [(one["address"], one["address"] + one["total_size"]) for one in step._pool.snapshot()]
    assert segments
    assert len(step._recorded) >= 3, "there are to be several graphs of the same learners"
    for one in step._recorded.values():
        read = {"rates": one.rates, "betas": step.betas, "scale": one.current.scale, **one.rows.tensors}
        assert read["scale"] is not None
        for name, value in read.items():
            place = value.untyped_storage().data_ptr()
            assert not any(start <= place < end for start, end in segments), name


@pytest.mark.parametrize("kind", ["compiled", "captured"])
def test_so_it_is_over_rows_of_many_shapes(packed: Any, kind: str, of_many_shapes: DPO) -> None:
    asked = of_many_shapes
    plain, other = packed(asked, "eager"), packed(asked, kind)
    assert apart(other, plain) <= 1e-4
    for mine, theirs in zip(other.series, plain.series, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_it_repeats_itself(packed: Any, kind: str) -> None:
    one, other = (packed(settings(dtype="bfloat16"), kind) for _ in range(2))
    assert one.series == other.series
    assert apart(one, other) == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_learner_that_is_not_finite_stops_alone(packed: Any, kind: str, dtype: str) -> None:
    asked = settings(dtype=dtype)
    own = list(asked.own)
    own[1] = own[1].model_copy(update={"learning_rate": 1e30, "warmup_steps": 0})
    asked = asked.model_copy(update={"own": tuple(own)})
    pack, masked = packed(asked, kind), packed(asked, kind, {1})
    assert list(pack.failed) == [1]
    assert masked.failed == {}
    assert [len(series["loss"]) for series in pack.series] == [6, 1, 6, 6]
    assert all(
        torch.isfinite(value).all() for adapter in pack.finished.values() for value in adapter.values()
    )
    # The others are, bit for bit, what they are beside one that is masked from the start.
    for number in (0, 2, 3):
        assert pack.series[number] == masked.series[number]
        for name, value in pack.finished[number].items():
            assert torch.equal(value, masked.finished[number][name]), (number, name)
