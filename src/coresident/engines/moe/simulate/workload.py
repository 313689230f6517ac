"""The workload `moe.simulate`, as the lab finds it: nothing heavy is imported before a cell runs."""

from __future__ import annotations

from coresident.engines.moe.simulate.parameters import Simulate
from coresident.workload import Metric, Needs, Reporter, Workload

METRICS = (
    Metric("hit_rate", "1", "more", "of the experts that decode steps chose, those resident before the step"),
    Metric("complete_share", "1", "more", "layer-steps whose experts were all resident"),
    Metric("independent_share", "1", None, "h^k: what complete_share were if hits came independently"),
    Metric("misses_per_token", "1", "less", "experts that a token waits for"),
    Metric("fetched_per_token", "1", "less", "experts moved a token: misses, and what is fetched ahead"),
    Metric("wasted_per_token", "1", "less", "experts a token that were fetched ahead and never used"),
    Metric(
        "prefetch_precision", "1", "more", "of what was fetched ahead, what was used before it was evicted"
    ),
    Metric("recall", "1", "more", "recall@m of the predictor, over the layers from `depth` on"),
    Metric("precision", "1", "more", "precision of the predictor, over the layers from `depth` on"),
    Metric("covered_share", "1", "more", "layers that the predictor predicts"),
    Metric("chance_recall", "1", None, "recall@m of experts at random"),
    Metric("static_recall", "1", None, "recall@m of the fit prompts' most frequent experts"),
    Metric("previous_recall", "1", None, "recall@m of the token before"),
    Metric("demand_hit_rate", "1", None, "hit_rate of the same without fetching ahead"),
    Metric("belady_hit_rate", "1", None, "hit_rate of Belady's rule without fetching ahead"),
    Metric("oracle_hit_rate", "1", None, "hit_rate of the same policy with a predictor that is always right"),
    Metric("tokens_per_second", "1/s", "more", "as simulated on one link, first come first served"),
    Metric("demand_tokens_per_second", "1/s", None, "the same without fetching ahead"),
    Metric("resident_tokens_per_second", "1/s", None, "bound with every expert resident"),
    Metric("serial_tokens_per_second", "1/s", None, "bound where every miss is waited for"),
    Metric("overlapped_tokens_per_second", "1/s", None, "bound where fetching hides behind computing"),
    Metric("bytes_per_token", "B", "less", "moved to the device a token"),
    Metric("wasted_bytes_per_token", "B", "less", "moved ahead a token and never used"),
    Metric("late_share", "1", "less", "of the fetches ahead that their step used, those it waited for"),
    Metric("tokens", "1", None, "decode steps"),
)


def _run(parameters: Simulate, cell: Reporter) -> None:
    from coresident.engines.moe.simulate.cell import run

    run(parameters, cell)


def _inspect(parameters: Simulate) -> Needs:
    from coresident.engines.moe.simulate.cell import inspect

    return inspect(parameters)


simulate = Workload(
    name="moe.simulate",
    about="decoding with bounded resident experts, simulated over recorded routing",
    parameters=Simulate,
    metrics=METRICS,
    controls=frozenset({"held-out"}),
    run=_run,
    inspect=_inspect,
)
