"""`same`: equal by name in every block, refuted by the first difference, and nothing to compare supports
nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from coresident.lab.verdict.model import State

SAME = {"claim": "c", "compare": {"arm": "fork", "to": "native"}, "expect": {"same": True}}
LOSSES = {"loss-0": [0.69, 0.5], "loss-1": [0.7, 0.6]}
ADAPTERS = {"adapter-0": "aa", "adapter-1": "bb"}


def blocks(lab: Any, count: int = 3) -> Any:
    run = lab({"H1": SAME})
    for repetition in range(count):
        for arm in ("native", "fork"):
            run.add(arm, repetition, series=LOSSES, digests=ADAPTERS)
    return run


def change(run: Any, repetition: int, arm: str, **update: Any) -> Any:
    for index, record in enumerate(run.records):
        if record.block.repetition == repetition and record.cell.arm == arm:
            run.records[index] = record.model_copy(update=update)
    return run


def test_equal_series_and_digests_in_three_blocks_are_the_same(lab: Any) -> None:
    judged = blocks(lab).judged()
    assert judged.state is State.SUPPORTED
    assert judged.why == "2 series and 2 digests equal in each of 3 blocks"


def test_two_equal_blocks_are_too_few(lab: Any) -> None:
    judged = blocks(lab, 2).judged()
    assert judged.state is State.UNDECIDED
    assert "2 pairs of the 3 needed" in judged.why


@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_other_digest_in_one_block_refutes_even_a_single_block(lab: Any, count: int) -> None:
    run = change(blocks(lab, count), count - 1, "fork", digests={**ADAPTERS, "adapter-1": "cc"})
    judged = run.judged()
    assert judged.state is State.REFUTED
    assert judged.why == f"digest 'adapter-1' of fork differs from that of native in block {count}"


def test_one_other_loss_refutes_and_is_located(lab: Any) -> None:
    run = blocks(lab)
    run.add("native", 3, series=LOSSES, digests=ADAPTERS)
    run.add("fork", 3, series={**LOSSES, "loss-1": [0.7, 0.6000001]}, digests=ADAPTERS)
    judged = run.judged()
    assert judged.state is State.REFUTED
    assert "series 'loss-1'" in judged.why and "element 1" in judged.why and "block 4" in judged.why


def test_a_series_cut_short_is_not_the_same(lab: Any) -> None:
    run = blocks(lab)
    run.add("native", 3, series=LOSSES, digests=ADAPTERS)
    run.add("fork", 3, series={**LOSSES, "loss-0": [0.69]}, digests=ADAPTERS)
    assert "length 1 against 2" in run.judged().why


@pytest.mark.parametrize("arm", ["fork", "native"])
def test_a_name_that_one_arm_alone_reports_refutes(lab: Any, arm: str) -> None:
    run = change(blocks(lab), 1, arm, digests={**ADAPTERS, "adapter-2": "dd"})
    judged = run.judged()
    assert judged.state is State.REFUTED
    assert judged.why == f"digest 'adapter-2' was reported by {arm} alone in block 2"


@pytest.mark.parametrize("silent", [["fork"], ["native"], ["fork", "native"]])
def test_nothing_to_compare_supports_nothing(lab: Any, silent: list[str]) -> None:
    run = blocks(lab)
    for arm in silent:
        run = change(run, 2, arm, series={}, digests={})
    judged = run.judged()
    assert judged.state is State.UNDECIDED
    assert "nothing to compare" in judged.why and "block 3" in judged.why


def test_a_failed_control_is_invalid_and_nothing_run_is_pending(lab: Any) -> None:
    assert lab({"H1": SAME}).judged().state is State.PENDING
    run = lab({"H1": SAME})
    for repetition in range(3):
        run.add("native", repetition, series=LOSSES)
        run.add("fork", repetition, series=LOSSES, status="invalid", failed_control="base-unchanged")
    assert run.judged().state is State.INVALID
    assert "base-unchanged" in run.judged().why


def test_series_of_two_lengths_tell_where_their_values_part(lab: Any) -> None:
    run = blocks(lab)
    run.add("native", 3, series=LOSSES, digests=ADAPTERS)
    run.add("fork", 3, series={**LOSSES, "loss-0": [0.7]}, digests=ADAPTERS)
    assert "(length 1 against 2) from element 0 on (0.7 against 0.69)" in run.judged().why
