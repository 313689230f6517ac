"""`--view nonfinite`: a census of the learners whose loss or gradient was no finite number, by record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coresident.engines.pool.views.learners import WORKLOADS, expected, learners, named_nonfinite
from coresident.views import Seen, View, ViewTable


def data(seen: Sequence[Seen]) -> list[dict[str, Any]]:
    """For each record: learners asked for, with losses, finite, and the others with what and when, as far as told."""
    return [_record(one) for one in seen]


def _record(one: Seen) -> dict[str, Any]:
    found = learners(one.record)
    bad: dict[int, dict[str, Any]] = {
        learner.number: {"what": "loss", "step": learner.broken_at}
        for learner in found
        if None in learner.losses
    }
    # A learner ends before it writes down what was not finite: the cell's reason names it, or where its siblings went
    # on, the environment does.
    failed = one.record.get("environment", {}).get("failed") or {}
    told = [str(one.record.get("reason", "")), *(f"{member}: {reason}" for member, reason in failed.items())]
    bad |= named_nonfinite("; ".join(told))
    asked, numbers = expected(one.record), {learner.number for learner in found} | set(bad)
    missing = [number for number in range(asked or 0) if number not in numbers]
    return {
        "record": one.id,
        "status": one.record.get("status"),
        "retracted": one.retracted,
        "learners": asked,
        "finite": len(numbers) - len(bad),
        "nonfinite": [{"learner": number, **bad[number]} for number in sorted(bad)],
        "missing": missing,
    }


def tables(rows: Sequence[Mapping[str, Any]]) -> list[ViewTable]:
    """One row a record, and the total."""
    told = [
        (
            row["record"] + (" (retracted)" if row["retracted"] else ""),
            str(row["status"]),
            "-" if row["learners"] is None else str(row["learners"]),
            str(row["finite"]),
            ", ".join(map(_said, row["nonfinite"])) or "-",
            ", ".join(map(str, row["missing"])) or "-",
        )
        for row in rows
    ]
    bad = sum(len(row["nonfinite"]) for row in rows)
    places = sum(bool(row["nonfinite"]) for row in rows)
    title = f"{bad} nonfinite learners in {places} of {len(rows)} records"
    headers = ("record", "status", "learners", "finite", "nonfinite", "missing")
    return [ViewTable(headers, tuple(told), title, frozenset({2, 3}))]


def _said(learner: Mapping[str, Any]) -> str:
    when = "" if learner["step"] is None else f" ({learner['what']} at step {learner['step']})"
    return f"{learner['learner']}{when}"


view = View("nonfinite", "census of learners whose loss was not finite", WORKLOADS, data, tables)
