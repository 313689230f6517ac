"""How much work several workers did a second, together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from coresident.lab.records.schema import MetricValue, Worker


def throughput(workers: Sequence[Worker]) -> MetricValue | None:
    """Total work over (last end - first start), in `<unit>/s`.

    None without workers, a common unit, or a window. Not the sum of the workers' own rates: with windows that
    do not overlap that sum is more than the device ever did.
    """
    units = {worker.unit for worker in workers}
    if len(units) != 1:
        return None
    window = max(worker.end for worker in workers) - min(worker.start for worker in workers)
    rate = sum(worker.work for worker in workers) / window if window > 0 else math.inf
    return MetricValue(value=rate, unit=f"{units.pop()}/s") if math.isfinite(rate) else None
