"""Simulations as rows: what was asked, each beside demand, Belady's rule, the oracle and everything resident."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coresident.engines.moe.columns import aligned
from coresident.engines.moe.simulate.parameters import Simulate
from coresident.engines.moe.simulate.simulation import Figures, Simulated

_COLUMNS = (
    ("capacity", "slots"),
    ("policy", "policy"),
    ("fetching", "fetching ahead"),
    ("hit_rate", "hits"),
    ("complete_share", "complete"),
    ("independent_share", "h^k"),
    ("misses_per_token", "misses"),
    ("fetched_per_token", "fetched"),
    ("wasted_per_token", "wasted"),
    ("recall", "recall"),
    ("precision", "precision"),
    ("prefetch_precision", "used"),
    ("late_share", "late"),
    ("bytes_per_token", "bytes"),
    ("tokens_per_second", "tok/s"),
    ("serial_tokens_per_second", "serial"),
    ("overlapped_tokens_per_second", "overlapped"),
)


def rows(settings: Simulate, found: Simulated, last: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """One row for what was asked, and before it those that it is read beside, unless `last` has them already."""
    made = [_row(settings, "resident", "", None, found)]
    made.append(_row(settings, "belady", "", found.belady, found))
    if found.oracle is not None:
        made.append(_row(settings, settings.policy, "oracle", found.oracle, found))
    if settings.policy != "belady":
        made.append(_row(settings, settings.policy, "", found.demand, found))
    if settings.predictor not in (None, "oracle"):
        made.append(_row(settings, settings.policy, str(settings.predictor), found.asked, found))
    keys = {_key(row) for row in last}
    return [row for row in made if _key(row) not in keys]


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return str(row["capacity"]), row["policy"], row["fetching"], row["depth"], row["width"]


def _row(
    settings: Simulate, policy: str, fetching: str, figures: Figures | None, found: Simulated
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "capacity": settings.capacity if isinstance(settings.capacity, int) else list(settings.capacity),
        "policy": policy,
        "fetching": fetching,
        "depth": settings.depth if fetching else None,
        "width": settings.width if fetching else None,
        "split": settings.split,
        "between": settings.between,
    }
    if figures is None:
        times = found.demand.times
        row |= {"capacity": None, "hit_rate": 1.0, "complete_share": 1.0, "misses_per_token": 0.0}
        return row | ({"tokens_per_second": 1 / times.resident} if times else {})
    row |= {
        "hit_rate": figures.hit_rate,
        "complete_share": figures.complete,
        "independent_share": figures.independent,
        "misses_per_token": figures.misses,
        "fetched_per_token": figures.fetched,
        "wasted_per_token": figures.wasted,
        "families": figures.families,
    }
    if figures.predicted is not None:
        row |= {"recall": figures.predicted.recall, "precision": figures.predicted.precision}
    if figures.used is not None:
        row["prefetch_precision"] = figures.used
    if figures.times is not None:
        times = figures.times
        row |= {
            "late_share": times.late,
            "bytes_per_token": times.bytes,
            "wasted_bytes_per_token": times.wasted_bytes,
            "tokens_per_second": 1 / times.simulated,
            "serial_tokens_per_second": 1 / times.serial,
            "overlapped_tokens_per_second": 1 / times.overlapped,
        }
    return row


def table(found: Sequence[dict[str, Any]]) -> str:
    """The rows as text, without columns that no row has."""
    columns = [(key, name) for key, name in _COLUMNS if any(row.get(key) not in (None, "") for row in found)]
    cells = [[name for _, name in columns]]
    cells += [[_cell(row.get(key)) for key, _ in columns] for row in found]
    return aligned(cells)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return str(value)
