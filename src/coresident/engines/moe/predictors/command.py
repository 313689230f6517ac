"""`coresident moe fit-predictor`: every predictor fitted on the fit prompts and judged on the others."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coresident.engines.moe.columns import aligned
from coresident.engines.moe.place import whole
from coresident.engines.moe.predictors.fitted import directory, fit, save
from coresident.engines.moe.predictors.judging import judge
from coresident.engines.moe.predictors.kinds import FITTED, KINDS, Kind
from coresident.engines.moe.predictors.ranking import allowed
from coresident.engines.moe.traces.files import read
from coresident.engines.moe.traces.traces import Traces
from coresident.errors import UserError, nearest

POPULARITY = "popularity.json"


def fitted(
    path: Path, kinds: Sequence[str], depths: Sequence[int], width: int | None, out: Path | None, seed: int
) -> list[dict[str, Any]]:
    """One row a predictor and depth; kept in the new directory `out` where it is given, all of them or none.

    `all` are those that these traces and depths allow; a kind that is named and cannot be had is an error, as is a depth
    that no predictor can have.
    """
    traces = read(path)
    held = traces.of("held-out")
    m = traces.model.top_k if width is None else width
    asked = _asked(kinds, depths, traces)
    with contextlib.nullcontext() if out is None else whole(out) as kept:
        return [_row(kind, depth, m, seed, traces, held, kept) for kind, depth in asked]


def _row(
    kind: Kind, depth: int, m: int, seed: int, traces: Traces, held: Traces, kept: Path | None
) -> dict[str, Any]:
    made = fit(kind, depth, traces)
    judged = judge(made, held, m, seed)
    if kept is not None and kind in FITTED:
        own = kept / directory(kind, depth)
        save(made, own)
        if kind == "static":
            # What `moe generate --policy static` takes.
            scores = json.dumps(made.tables["scores"].tolist()) + "\n"
            (own / POPULARITY).write_text(scores, encoding="utf-8")
    return {
        "kind": kind,
        "depth": depth,
        "width": m,
        **asdict(judged["all"]),
        "families": {name: asdict(one) for name, one in judged.items() if name != "all"},
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Recall@m of all and by family, and precision."""
    families = list(rows[0]["families"]) if rows else []
    cells = [["predictor", "depth", "m", "recall", "precision", "covered", *families]]
    for row in rows:
        numbers = [row["recall"], row["precision"], row["covered"]]
        numbers += [row["families"][family]["recall"] for family in families]
        cells.append(
            [row["kind"], str(row["depth"]), str(row["width"]), *(f"{value:.3f}" for value in numbers)]
        )
    return aligned(cells)


def _asked(kinds: Sequence[str], depths: Sequence[int], traces: Traces) -> list[tuple[Kind, int]]:
    """What is fitted, all of which these traces allow: what they do not is told before anything is fitted."""
    found: list[tuple[Kind, int]] = []
    for kind in KINDS if "all" in kinds else kinds:
        if kind not in KINDS:
            raise UserError(f"there is no predictor {kind!r}", nearest(kind, [*KINDS, "all"]))
        for depth in depths:
            # What looks at nothing or at the token before goes deepest: where it cannot, none can.
            if "all" not in kinds or kind == "chance":
                allowed(kind, depth, traces)
            elif not _can(kind, depth, traces):
                continue
            found.append((kind, depth))
    return sorted(found, key=lambda one: one[1])


def _can(kind: Kind, depth: int, traces: Traces) -> bool:
    try:
        allowed(kind, depth, traces)
    except UserError:
        return False
    return True
