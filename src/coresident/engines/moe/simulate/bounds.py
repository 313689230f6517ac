"""How little time a token can take, from measured rates: what no schedule of the same misses can beat."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from coresident.workload import Parameters

_NotNegative = Annotated[float, Field(ge=0)]


class Cost(Parameters):
    """Measured rates: S `expert_bytes` of one record, B `bytes_per_second` of the link, `fetch_seconds` that each fetch
    takes besides, T_resident `resident_seconds` of a token with every expert resident, and `sync_seconds` in which a layer's
    choice reaches the host.
    """

    expert_bytes: Annotated[int, Field(ge=1)]
    bytes_per_second: Annotated[float, Field(gt=0)]
    resident_seconds: Annotated[float, Field(gt=0)]
    fetch_seconds: _NotNegative = 0.0
    sync_seconds: _NotNegative = 0.0

    @property
    def fetch(self) -> float:
        """Seconds of one fetch."""
        return self.fetch_seconds + self.expert_bytes / self.bytes_per_second


def serial(cost: Cost, layers: int, misses: float) -> float:
    """Seconds a token where every miss is waited for: T_resident + L t_sync + misses S / B."""
    return cost.resident_seconds + layers * cost.sync_seconds + misses * cost.fetch


def overlapped(cost: Cost, fetched: float) -> float:
    """Seconds a token where fetching hides behind computing as far as it can: max(T_resident, fetched S / B)."""
    return max(cost.resident_seconds, fetched * cost.fetch)
