"""`status`: outcomes counted over repetitions; what says nothing of the cell itself is not counted."""

from __future__ import annotations

from typing import Any

import pytest

from coresident.lab.verdict.model import State


def claim(is_: str, **bound: float) -> dict[str, Any]:
    return {"H1": {"claim": "c", "compare": {"arm": "fork"}, "expect": {"status": {"is": is_, **bound}}}}


def ended(lab: Any, claimed: dict[str, Any], statuses: list[str]) -> Any:
    run = lab(claimed)
    for repetition, status in enumerate(statuses):
        run.add("fork", repetition, status=status)
    return run


def test_a_share_is_supported_by_enough_outcomes_alone(lab: Any) -> None:
    # All of nine: the share is at least 0.01 ** (1 / 9) = 0.599 with 98 % confidence.
    assert ended(lab, claim("ok", at_least=0.59), ["ok"] * 9).judged().state is State.SUPPORTED
    judged = ended(lab, claim("ok", at_least=0.61), ["ok"] * 9).judged()
    assert judged.state is State.UNDECIDED
    assert judged.findings[0].low == pytest.approx(0.599, abs=1e-3)
    assert judged.why.startswith("9 of 9 ended ok; ")


def test_a_share_is_refuted_by_the_opposite(lab: Any) -> None:
    assert ended(lab, claim("ok", at_least=0.9), ["oom"] * 5).judged().state is State.REFUTED
    assert ended(lab, claim("oom", at_most=0.1), ["oom"] * 5).judged().state is State.REFUTED


def test_failed_invalid_and_interrupted_attempts_are_not_counted(lab: Any) -> None:
    statuses = ["ok", "oom", "nonfinite", "timeout", "failed", "invalid", "interrupted"]
    (finding,) = ended(lab, claim("ok", at_least=0.1), statuses).judged().findings
    assert (finding.pairs, finding.estimate) == (4, 0.25)


def test_fewer_than_three_outcomes_are_undecided(lab: Any) -> None:
    judged = ended(lab, claim("ok", at_least=0.0001), ["ok", "ok"]).judged()
    assert judged.state is State.UNDECIDED
    assert "2 outcomes of the 3 needed" in judged.why


def test_a_repetition_counts_once_by_its_newest_outcome(lab: Any) -> None:
    run = ended(lab, claim("ok", at_least=0.1), ["oom", "ok", "ok"])
    run.add("fork", 0, status="ok", generation=1)
    (finding,) = run.judged().findings
    assert (finding.pairs, finding.estimate) == (3, 1.0)


def test_outcomes_under_older_conditions_are_not_counted(lab: Any) -> None:
    run = lab(claim("ok", at_least=0.1))
    for repetition in range(3):
        run.add("fork", repetition, status="oom", conditions={"driver": "1"})
    for repetition in range(3, 6):
        run.add("fork", repetition, status="ok", conditions={"driver": "2"})
    (finding,) = run.judged().findings
    assert (finding.pairs, finding.estimate) == (3, 1.0)
    assert finding.set_aside[0].differing == (("driver", "1", "2"),)


def test_a_failed_control_is_invalid_and_nothing_run_is_pending(lab: Any) -> None:
    assert lab(claim("ok", at_least=0.5)).judged().state is State.PENDING
    run = lab(claim("ok", at_least=0.5))
    for repetition in range(3):
        run.add("fork", repetition, status="invalid", failed_control="pinned-cpus")
    assert run.judged().state is State.INVALID
    assert "pinned-cpus" in run.judged().why
