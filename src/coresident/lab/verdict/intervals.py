"""Confidence intervals, as pure functions of numbers: the calibration test simulates exactly what judges.

The level is 98 %: 95 % intervals decide falsely too often once runs stop on width
(tests/lab/verdict/calibrate.py). Below ten blocks the interval is Student's t. From ten on a percentile
bootstrap of the mean (Efron 1979) is taken as well and each side keeps the end that is farther out, so that a
skewed sample cannot narrow it. The stated noise floor is then added: what the machine cannot resolve is not
evidence (after criterion).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONFIDENCE = 0.98
FEWEST = 3
BOOTSTRAP_FROM = 10
_RESAMPLES = 4000
_SEED = 20250101


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the ends of its interval, all finite, `low <= estimate <= high`."""

    estimate: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the width relative to the estimate: 0.01 reads "known to 1 %"."""
        half = (self.high - self.low) / 2
        if self.estimate == 0.0:
            return 0.0 if half == 0.0 else math.inf
        return half / abs(self.estimate)


def interval(values: Sequence[float], floor: float = 0.0) -> Interval | None:
    """The mean of `values` and its 98 % interval, `floor` (absolute) added at each side.

    None for fewer than three values: a spread cannot be told from so few, and is never taken to be zero. None
    also where a value or the arithmetic is not finite.
    """
    count = len(values)
    if count < FEWEST or not all(map(math.isfinite, values)):
        return None
    # Deviations from the first value, in units of the largest: constant data give exactly zero, and nothing
    # overflows.
    scale = max(map(abs, values)) or 1.0
    origin = values[0] / scale
    shifted = [value / scale - origin for value in values]
    centre = math.fsum(shifted) / count
    spread = math.fsum((value - centre) ** 2 for value in shifted) / (count - 1)
    half = t_quantile(count - 1) * math.sqrt(spread / count)
    below = above = half
    if count >= BOOTSTRAP_FROM and half > 0.0:
        means = _resamples(count) @ [value - centre for value in shifted]
        lower, upper = _ends(means)
        below, above = max(half, -lower), max(half, upper)
    estimate = values[0] + centre * scale
    found = Interval(estimate, estimate - below * scale - floor, estimate + above * scale + floor)
    return found if math.isfinite(found.high - found.low) else None


@lru_cache(maxsize=1024)
def t_quantile(freedom: int) -> float:
    """Student's t: two-sided 98 % quantile for `freedom` degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


@lru_cache(maxsize=64)
def _resamples(count: int) -> NDArray[np.float64]:
    """Weights, [resamples, count], that turn a sample into its resamples' means; the same at every call."""
    import numpy as np

    random = np.random.default_rng([_SEED, count])
    return random.multinomial(count, [1 / count] * count, size=_RESAMPLES) / count


def _ends(means: NDArray[np.float64]) -> tuple[float, float]:
    """The percentile interval: as many resampled means lie outside at each end as the level allows."""
    import numpy as np

    outside = math.floor(_RESAMPLES * (1 - CONFIDENCE) / 2 + 1e-9)
    ordered = np.partition(means, (outside - 1, _RESAMPLES - outside))
    return float(ordered[outside - 1]), float(ordered[_RESAMPLES - outside])


def rate(hits: int, trials: int) -> Interval | None:
    """The rate of `hits` among `trials`, 98 % interval of Clopper and Pearson (1934); None below 3 trials."""
    if trials < FEWEST:
        return None
    from scipy.special import betaincinv

    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if hits == 0 else float(betaincinv(hits, trials - hits + 1, tail))
    high = 1.0 if hits == trials else float(betaincinv(hits + 1, trials - hits, 1 - tail))
    return Interval(hits / trials, low, high)
