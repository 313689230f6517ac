"""`coresident moe fit-predictor`: every predictor fitted on the fit prompts and judged on the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coresident.engines.moe.columns import aligned
from coresident.engines.moe.predictors.fitted import fit, save
from coresident.engines.moe.predictors.judging import judge
from coresident.engines.moe.predictors.kinds import ACROSS, FITTED, KINDS, READS_LOGITS, Kind
from coresident.engines.moe.traces.traces import Traces, read
from coresident.errors import UserError, nearest

POPULARITY = "popularity.json"


def fitted(
    path: Path, kinds: Sequence[str], depths: Sequence[int], width: int | None, out: Path | None, seed: int
) -> list[dict[str, Any]]:
    """One row a predictor and depth; kept in `out` where it is given.

    `all` are those that these traces and depths allow; a kind that is named and cannot be had is an error.
    """
    traces = read(path)
    if out is not None and out.exists():
        raise UserError(f"{out} is already there", "remove it, or choose another directory")
    held = traces.of("held-out")
    m = traces.model.top_k if width is None else width
    rows = []
    for kind, depth in _asked(kinds, depths, traces):
        made = fit(kind, depth, traces)
        judged = judge(made, held, m, seed)
        if out is not None and kind in FITTED:
            place = out / f"{kind}-{depth}"
            save(made, place)
            if kind == "static":
                # What `moe generate --policy static` takes.
                (place / POPULARITY).write_text(
                    json.dumps(made.tables["scores"].tolist()) + "\n", encoding="utf-8"
                )
        rows.append(
            {
                "kind": kind,
                "depth": depth,
                "width": m,
                **asdict(judged["all"]),
                "families": {name: asdict(one) for name, one in judged.items() if name != "all"},
            }
        )
    return rows


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
    found: list[tuple[Kind, int]] = []
    for kind in KINDS if list(kinds) == ["all"] else kinds:
        if kind not in KINDS:
            raise UserError(f"there is no predictor {kind!r}", nearest(kind, [*KINDS, "all"]))
        found += [(kind, depth) for depth in depths if "all" not in kinds or _allowed(kind, depth, traces)]
    return sorted(found, key=lambda one: one[1])


def _allowed(kind: Kind, depth: int, traces: Traces) -> bool:
    """Whether these traces hold what the predictor looks at."""
    if kind in ACROSS and depth >= traces.layers:
        return False
    if kind == "next-router" and depth not in traces.depths:
        return False
    return kind not in READS_LOGITS or all(one.logits is not None for one in traces.prompts)
