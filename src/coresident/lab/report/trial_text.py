"""How `coresident try` ends: one plain sentence, which says what was found whichever side it is on."""

from __future__ import annotations

from coresident.lab.verdict.model import Verdict

# From here on "so many times" reads better than per cent.
_TIMES = 3.0


def sentence(verdict: Verdict, metric: str) -> str:
    """What B takes against A, with the interval's ends, or that no difference was shown."""
    finding = verdict.hypotheses[0].findings[0]
    estimate, low, high = finding.estimate, finding.low, finding.high
    if estimate is None or low is None or high is None:
        return f"no difference can be told: {finding.why}"
    if low > 1:
        if estimate >= _TIMES:
            return f"B takes {estimate:.3g} times the {metric} of A ({low:.3g} to {high:.3g} times)"
        return f"B takes {_percent(estimate)} more {metric} than A ({_percent(low)} to {_percent(high)})"
    if high < 1:
        return f"B takes {_percent(estimate)} less {metric} than A ({_percent(high)} to {_percent(low)})"
    return f"no difference shown: B takes between {_side(low)} and {_side(high)} {metric} than A"


def _side(ratio: float) -> str:
    return f"{_percent(ratio)} {'less' if ratio < 1 else 'more'}"


def _percent(ratio: float) -> str:
    part = 100 * abs(ratio - 1)
    # Nearly nothing left of it is not all of it gone.
    if ratio < 1 and part >= 99.5:
        return f"{part:.4g} %"
    return f"{part:.0f} %" if part >= 10 else f"{part:.2g} %"
