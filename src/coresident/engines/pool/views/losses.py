"""`--view losses`: each learner's losses, by record."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from coresident.engines.pool.views.learners import WORKLOADS, learners, number
from coresident.views import Seen, View, ViewTable


def data(seen: Sequence[Seen]) -> list[dict[str, Any]]:
    """For each record its learners: steps (None where only the ends are told), first, last and lowest loss, all losses kept."""
    return [
        {
            "record": one.id,
            "status": one.record.get("status"),
            "retracted": one.retracted,
            "learners": [
                {
                    "learner": learner.number,
                    "steps": learner.steps,
                    "first": learner.losses[0] if learner.losses else None,
                    "last": learner.losses[-1] if learner.losses else None,
                    "lowest": min((loss for loss in learner.losses if loss is not None), default=None),
                    "losses": list(learner.losses),
                    "kept": bool(learner.losses),
                }
                for learner in learners(one.record)
            ],
        }
        for one in seen
    ]


def tables(rows: Sequence[Mapping[str, Any]]) -> list[ViewTable]:
    """A table a record."""
    return [_table(row) for row in rows]


def _table(row: Mapping[str, Any]) -> ViewTable:
    told = []
    for learner in row["learners"]:
        steps = "ends only" if learner["steps"] is None else str(learner["steps"])
        # Series beyond a thousand values are kept as digests.
        figures = [
            number(learner[name]) if learner["kept"] else "not kept" for name in ("first", "last", "lowest")
        ]
        told.append((str(learner["learner"]), steps, *figures))
    last = [learner["last"] for learner in row["learners"] if learner["last"] is not None]
    middle = f"; last losses: median {statistics.median(last):.4f}" if last else ""
    state = f"{row['status']}{', retracted' if row['retracted'] else ''}"
    title = f"{row['record']} ({state}): {len(told)} learners{middle}"
    headers = ("learner", "steps", "first", "last", "lowest")
    return ViewTable(headers, tuple(told), title, frozenset({0, 1, 2, 3, 4}))


view = View("losses", "each learner's losses", WORKLOADS, data, tables)
