"""One simulation as a cell of the lab: what it needs, and what it reports."""

from __future__ import annotations

from pathlib import Path

from coresident.engines.moe.predictors.kinds import FITTED
from coresident.engines.moe.simulate import simulation
from coresident.engines.moe.simulate.parameters import Simulate
from coresident.engines.moe.simulate.simulation import Figures
from coresident.engines.moe.traces import validity
from coresident.engines.moe.traces.files import read
from coresident.engines.moe.traces.manifest import MANIFEST
from coresident.engines.moe.traces.traces import Traces
from coresident.workload import Needs, Reporter

_INTERPRETER = 100 << 20


def inspect(parameters: Simulate) -> Needs:
    """Check the traces and that the settings go with them. Raises UserError for what does not."""
    place = Path(parameters.traces).expanduser()
    whole = read(place)
    simulation.capacities(whole, parameters)
    simulation.chosen(whole, parameters)
    # The manifest holds the checksum of the routing.
    return Needs(memory=_INTERPRETER, inputs=(place / MANIFEST,))


def run(parameters: Simulate, cell: Reporter) -> None:
    """Simulate and report."""
    with cell.phase("read"):
        whole = read(Path(parameters.traces).expanduser())
    with cell.phase("simulate"):
        found = simulation.simulate(whole, parameters)
    asked = found.asked
    _held_out(whole, parameters, cell)
    for rate in asked.prompts:
        cell.sample("hit_rate", rate)
    values: dict[str, float | None] = {
        "hit_rate": asked.hit_rate,
        "complete_share": asked.complete,
        "independent_share": asked.independent,
        "misses_per_token": asked.misses,
        "fetched_per_token": asked.fetched,
        "wasted_per_token": asked.wasted,
        "prefetch_precision": asked.used,
        "demand_hit_rate": found.demand.hit_rate,
        "belady_hit_rate": found.belady.hit_rate,
        "oracle_hit_rate": found.oracle.hit_rate if found.oracle else None,
        "tokens": float(sum(one.steps for one in simulation.chosen(whole, parameters).prompts)),
        **{
            f"{name}_recall": found.beside[kind].recall
            for name, kind in (("chance", "chance"), ("static", "static"), ("previous", "previous-token"))
            if kind in found.beside
        },
        **_predicted(asked),
        **_times(asked, found.demand),
    }
    for metric, value in values.items():
        if value is not None:
            unit = "B" if "bytes" in metric else "1/s" if metric.endswith("_second") else "1"
            cell.metric(metric, value, unit)
    cell.digest("traces", whole.model.identity)
    cell.done()


def _predicted(asked: Figures) -> dict[str, float]:
    if asked.predicted is None:
        return {}
    judged = asked.predicted
    return {"recall": judged.recall, "precision": judged.precision, "covered_share": judged.covered}


def _times(asked: Figures, demand: Figures) -> dict[str, float]:
    if asked.times is None or demand.times is None:
        return {}
    return {
        "tokens_per_second": 1 / asked.times.simulated,
        "demand_tokens_per_second": 1 / demand.times.simulated,
        "resident_tokens_per_second": 1 / asked.times.resident,
        "serial_tokens_per_second": 1 / asked.times.serial,
        "overlapped_tokens_per_second": 1 / asked.times.overlapped,
        "bytes_per_token": asked.times.bytes,
        "wasted_bytes_per_token": asked.times.wasted_bytes,
        "late_share": asked.times.late,
    }


def _held_out(whole: Traces, parameters: Simulate, cell: Reporter) -> None:
    """Whether anything was judged on prompts that it was fitted on."""
    fits = parameters.predictor in FITTED or parameters.policy == "static"
    decoded = {validity.key(one) for one in simulation.chosen(whole, parameters).prompts}
    fitted = {validity.key(one) for one in whole.prompts if one.split == "fit"} if fits else set()
    shared = len(decoded & fitted)
    cell.control("held-out", 0, shared, shared == 0, "" if not shared else "prompts on both sides")
