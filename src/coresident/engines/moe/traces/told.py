"""What a set of traces holds, in a few lines."""

from __future__ import annotations

from collections import Counter
from typing import Any

from coresident.engines.moe.traces import validity
from coresident.engines.moe.traces.traces import Traces


def summary(traces: Traces) -> dict[str, Any]:
    """Prompts by family and split, decode steps, and how much a step reuses of the one before, beside chance."""
    model = traces.model
    return {
        "model": model.identity[:12],
        "architecture": model.architecture,
        "layers": traces.layers,
        "experts": model.experts,
        "top_k": model.top_k,
        "prompts": len(traces.prompts),
        "families": dict(Counter(one.family for one in traces.prompts)),
        "splits": dict(Counter(one.split for one in traces.prompts)),
        "decode_steps": sum(one.steps for one in traces.prompts),
        "reuse": validity.reuse(traces),
        "chance": model.top_k / model.experts,
    }
