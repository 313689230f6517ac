"""A pack learns what each of its learners learns alone; and what would show if it did not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from coresident.engines.pool.learning.adapter import adapter_tensors
from coresident.engines.pool.learning.learner import NonFinite
from coresident.engines.pool.learning.tokenized import TokenPair, collate
from coresident.engines.pool.packed import policy as policies
from coresident.engines.pool.packed.captured import rounded
from coresident.engines.pool.packed.extent import Extent
from coresident.engines.pool.packed.groups import Groups
from coresident.engines.pool.packed.kinds import Kind
from coresident.engines.pool.packed.pack import Pack
from coresident.engines.pool.packed.rows import Rows, pack
from coresident.engines.pool.packed.step import Step
from coresident.engines.pool.packed.written import Written
from coresident.engines.pool.parameters import DPO
from coresident.errors import InternalError


def mixed(**values: Any) -> DPO:
    """Four learners that differ in all that a learner may have of its own; the third has 10 pairs and two passes."""
    own = [
        {"rank": 4, "alpha": 8.0, "learning_rate": 1e-3},
        {"rank": 8, "alpha": 8.0, "learning_rate": 3e-3, "clip": 0.2, "steps": 12, "max_length": 40},
        {"rank": 16, "alpha": 32.0, "seed": 7, "warmup_steps": 5, "batch": 3, "passes": 2, "pairs": 10},
        {"rank": 8, "learning_rate": 2e-3, "weight_decay": 0.1, "beta": 0.3},
    ]
    given = {
        "sharing": "packed", "learners": 4, "steps": 20, "max_length": 64, "data": {"pairs": 12}, "own": own,
        "learning_rate": 1e-3,
    }  # fmt: skip
    return DPO.model_validate(given | values)


def run(pack: Pack) -> Pack:
    while not pack.over:
        pack.step()
    pack.close()
    return pack


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    left = torch.cat([one[name].double().flatten() for name in sorted(one)])
    right = torch.cat([other[name].double().flatten() for name in sorted(other)])
    return ((left - right).norm() / right.norm()).item()


def series_distance(one: list[float], other: list[float]) -> float:
    left, right = torch.tensor(one).double(), torch.tensor(other).double()
    return ((left - right).norm() / right.norm()).item()


class Alone:
    """What learners of given settings learn by themselves."""

    def __init__(self, alone: Callable[..., Any], settings: DPO) -> None:
        self.adapters: list[dict[str, torch.Tensor]] = []
        self.series: list[dict[str, list[float]]] = []
        for number in range(settings.learners):
            learner = alone(settings, number)
            try:
                for _ in range(settings.of(number).steps):
                    learner.step()
            except (NonFinite, InternalError):
                # It stopped, or its data are through.
                pass
            self.adapters.append(adapter_tensors(learner.model))
            self.series.append(learner.series)

    def check(self, pack: Pack, close: float) -> None:
        """The fidelity that is claimed, of every learner."""
        for number, adapter in enumerate(self.adapters):
            mine, theirs = pack.series[number], self.series[number]
            assert len(mine["loss"]) == len(theirs["loss"])
            assert series_distance(mine["loss"], theirs["loss"]) <= close, f"losses of learner {number}"
            assert distance(pack.finished[number], adapter) <= close, f"adapter of learner {number}"


@pytest.mark.parametrize(("dtype", "close"), [("float64", 1e-10), ("float32", 1e-4)])
def test_each_learns_what_it_learns_alone(make: Any, alone: Any, dtype: str, close: float) -> None:
    settings = mixed(dtype=dtype)
    pack, true = run(make(settings)), Alone(alone, settings)
    true.check(pack, close)
    assert [len(series["loss"]) for series in pack.series] == [20, 12, 7, 20]
    for mine, theirs in zip(pack.series, true.series, strict=True):
        for name, values in theirs.items():
            assert mine[name] == pytest.approx(values, rel=close, abs=close), name


@pytest.mark.parametrize(
    "change",
    [
        {"loss": "sft"},
        {"reference": "precomputed"},
        {"checkpointing": True},
        {"targets": ["q_proj", "down_proj"]},
    ],
    ids=str,
)
def test_so_it_does_in_other_ways_of_learning(make: Any, alone: Any, change: dict[str, Any]) -> None:
    settings = mixed(dtype="float64", steps=6, **change)
    Alone(alone, settings).check(run(make(settings)), 1e-10)


@pytest.mark.parametrize("change", [{}, {"adapter_products": "bfloat16"}], ids=str)
def test_in_bfloat16_it_is_as_near_as_rounding_allows(make: Any, alone: Any, change: dict[str, Any]) -> None:
    settings = mixed(dtype="bfloat16", steps=6, **change)
    Alone(alone, settings).check(run(make(settings)), 2e-2)


def test_moments_in_8_bits_are_the_learners_own(make: Any, alone: Any) -> None:
    # Ranks such that tensors are whole blocks, and most large enough not to stay in float32 alone.
    own = [{"rank": 128}, {"rank": 128, "learning_rate": 2e-3}]
    settings = mixed(own=own, learners=2, optimizer="adamw8bit", steps=6)
    Alone(alone, settings).check(run(make(settings)), 5e-4)


def sick(**values: Any) -> DPO:
    """The second learner's rate makes it stop being finite at its second step."""
    settings = mixed(**values)
    own = list(settings.own)
    own[1] = own[1].model_copy(update={"learning_rate": 1e30, "warmup_steps": 0})
    return settings.model_copy(update={"own": tuple(own)})


def test_a_learner_that_is_not_finite_stops_alone_and_by_name(make: Any, alone: Any) -> None:
    settings = sick(dtype="float64", steps=6)
    pack = run(make(settings))
    assert list(pack.failed) == [1]
    assert "is nan at step 2" in pack.failed[1]
    # Its last good adapter is what it has alone, and so is all of the others.
    Alone(alone, settings).check(pack, 1e-10)


@pytest.mark.parametrize("kind", [Step, Written])
def test_the_others_are_as_in_the_pack_in_which_it_is_masked_bit_for_bit(make: Any, kind: type[Step]) -> None:
    settings = sick(steps=8)
    with_it, without = (run(make(settings, kind=Kind("", kind), masked=masked)) for masked in ((), {1}))
    assert list(with_it.failed) == [1]
    assert without.failed == {}
    assert without.series[1]["loss"] == []
    for number in (0, 2, 3):
        assert with_it.series[number] == without.series[number]
        for name, value in with_it.finished[number].items():
            assert torch.equal(value, without.finished[number][name])


def test_a_learners_rows_leave_with_its_last_step(make: Any) -> None:
    pack = make(mixed(steps=14))
    for _ in range(7):
        pack.step()
    assert pack.members == [0, 1, 2, 3]
    assert [number for number, _ in pack.step()] == [0, 1, 3]
    assert set(pack.finished) == {2}
    assert len(pack.arena.masters) == 3
    run(pack)
    assert set(pack.finished) == {0, 1, 2, 3}


def test_no_padded_row_is_computed(make: Any) -> None:
    pack = run(make(mixed(steps=3)))
    assert pack.fill == 1.0


def test_what_lies_beyond_a_rank_stays_zero(make: Any) -> None:
    pack = make(mixed(steps=4))
    for _ in range(4):
        pack.step()
        assert pack.arena.beyond().tolist() == [0, 0, 0, 0]
        for block in (pack.arena.grads, *pack.arena.moments):
            for row, rank in enumerate(pack.arena.ranks):
                own = torch.zeros_like(block, dtype=torch.bool)
                for _, place in pack.arena.parts(row, own):
                    place.fill_(True)
                assert not block[row][~own[row]].any(), rank


class Rounded(Written):
    """A written-out step over rows as a captured one takes them."""

    def shaped(self, rows: Rows, most: Extent | None) -> Rows:
        return rounded(rows, most)


@pytest.mark.parametrize("kind", [Written, Rounded])
@pytest.mark.parametrize(
    "change", [{}, {"loss": "sft"}, {"checkpointing": True}, {"reference": "precomputed"}], ids=str
)
def test_the_step_that_is_written_out_is_the_plain_one(
    make: Any, change: dict[str, Any], kind: type[Step]
) -> None:
    # transformers computes norms in float32 whatever the model's dtype, which is what is left between the two.
    settings = mixed(steps=9, dtype="float64", **change)
    plain, other = run(make(settings)), run(make(settings, kind=Kind("", kind)))
    for number in range(4):
        assert distance(other.finished[number], plain.finished[number]) <= 1e-6
        for name, values in plain.series[number].items():
            assert other.series[number][name] == pytest.approx(values, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("kind", [Step, Written])
def test_alpha_is_each_rows_own_when_the_same_rows_are_split_otherwise(make: Any, kind: type[Step]) -> None:
    settings = mixed(learners=3, dtype="float64")
    made = make(settings)
    made.arena.masters.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    long, short = (collate([TokenPair((1, 2), (3,) * more, (4, 5))], 64, 0) for more in (9, 3))
    one, other = (pack([*first, long]) for first in ((long, short), (short, long)))

    def step() -> Step:
        own = [settings.of(number) for number in range(3)]
        return kind(made.policy, made.arena, own, torch.ones(3, dtype=torch.bool))

    again = step()
    again.reference(one, adapters=True)
    assert torch.equal(again.reference(other, adapters=True), step().reference(other, adapters=True))


# What would be wrong, and must not pass.


@pytest.fixture
def true(alone: Any) -> Alone:
    return Alone(alone, mixed(dtype="float64", steps=5))


@pytest.fixture
def wronged(make: Any) -> Pack:
    pack: Pack = make(mixed(dtype="float64", steps=5))
    return pack


def test_the_check_passes_a_pack_that_is_right(wronged: Pack, true: Alone) -> None:
    true.check(run(wronged), 1e-10)


def test_adapters_swapped_between_two_learners_are_seen(
    wronged: Pack, true: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = policies.times

    def swapped(groups: Groups, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        return right(groups, rows, matrices[[0, 3, 2, 1]] if len(matrices) == 4 else matrices)

    monkeypatch.setattr(policies, "times", swapped)
    with pytest.raises(AssertionError, match="of learner"):
        true.check(run(wronged), 1e-10)


@pytest.mark.parametrize("which", ["lora_A", "lora_B"])
def test_a_pad_that_is_not_zero_is_seen(wronged: Pack, true: Alone, which: str) -> None:
    for name, place in wronged.arena.parts(3):
        if which in name:
            # The first row of A, or column of B, that is not the learner's.
            first = place.numel() if which == "lora_A" else place.shape[1]
            shape = (1, place.shape[1]) if which == "lora_A" else (place.shape[0], 1)
            place.as_strided(shape, place.stride(), place.storage_offset() + first).fill_(0.1)
    for _ in range(5):
        wronged.step()
    with pytest.raises(InternalError, match="beyond the rank of row 3"):
        wronged.close()
    assert series_distance(wronged.series[3]["loss"], true.series[3]["loss"]) > 1e-10


def test_a_reference_with_adapters_on_is_seen(
    wronged: Pack, true: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Step.reference
    monkeypatch.setattr(
        Step, "reference", lambda self, rows, adapters=False: right(self, rows, adapters=True)
    )
    with pytest.raises(AssertionError, match="losses of learner"):
        true.check(run(wronged), 1e-10)
