"""A simulation and what it is to be read beside: demand alone, Belady's rule, an oracle that fetches ahead, all resident."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coresident.engines.moe.cache import require
from coresident.engines.moe.predictors import counting
from coresident.engines.moe.predictors.fitted import Fitted, choose, fit, unseen
from coresident.engines.moe.predictors.judging import Judged, score
from coresident.engines.moe.predictors.kinds import FITTED, Kind
from coresident.engines.moe.predictors.ranking import ranked
from coresident.engines.moe.simulate import bounds
from coresident.engines.moe.simulate.bounds import Cost
from coresident.engines.moe.simulate.lanes import Rule
from coresident.engines.moe.simulate.parameters import Simulate
from coresident.engines.moe.simulate.play import Playing, play
from coresident.engines.moe.simulate.timing import timed
from coresident.engines.moe.traces.traces import Traces
from coresident.errors import UserError


@dataclass(frozen=True)
class Times:
    """Seconds a token: the bounds (all resident; every miss waited for; fetches hidden as far as they can be), and as
    simulated on one link. `late` is the share of the fetches ahead that their step needed and had to wait for.
    """

    resident: float
    serial: float
    overlapped: float
    simulated: float
    late: float
    bytes: float
    wasted_bytes: float


@dataclass(frozen=True)
class Figures:
    """Of all decode steps. `complete` is the share of layer-steps that missed nothing, beside `independent` = h^k, what it
    would be if hits came independently. `misses`, `fetched` (misses and fetches ahead) and `wasted` are experts a token.
    `used` is the share of fetches ahead used before they were evicted. `prompts` are each prompt's hit rate.
    """

    hit_rate: float
    complete: float
    independent: float
    misses: float
    fetched: float
    wasted: float
    used: float | None
    predicted: Judged | None
    families: dict[str, float]
    prompts: tuple[float, ...]
    times: Times | None


@dataclass(frozen=True)
class Simulated:
    """What was asked, and what it is read beside."""

    asked: Figures
    demand: Figures
    belady: Figures
    oracle: Figures | None
    beside: dict[Kind, Judged]


@dataclass(frozen=True)
class _Setting:
    traces: Traces
    whole: Traces
    capacities: tuple[int, ...]
    settings: Simulate

    @property
    def width(self) -> int:
        return self.settings.width or self.whole.model.top_k


def simulate(whole: Traces, settings: Simulate) -> Simulated:
    """Simulate `settings` over the traces `whole`, of which the split's prompts are decoded and the fit prompts fitted on.

    Raises UserError for capacities, predictors or prompts that these traces do not go with.
    """
    here = _Setting(chosen(whole, settings), whole, capacities(whole, settings), settings)
    rule, kind, depth = settings.policy, settings.predictor, settings.depth
    demand = _figures(here, rule, None)
    asked = demand if kind is None else _figures(here, rule, _predictor(here, kind))
    belady = demand if rule == "belady" else _figures(here, "belady", None)
    oracle = None
    if rule != "belady" and depth < whole.layers:
        oracle = (
            asked
            if kind == "oracle"
            else _figures(here, rule, fit("oracle", depth, whole), whole.model.top_k)
        )
    return Simulated(asked, demand, belady, oracle, {} if kind is None else _beside(here))


def chosen(whole: Traces, settings: Simulate) -> Traces:
    """The prompts that are decoded. Raises UserError where there are none."""
    found = whole.of(None if settings.split == "all" else settings.split)
    for family in settings.families:
        found.of(family=family)
    if settings.families:
        kept = tuple(one for one in found.prompts if one.family in settings.families)
        found = Traces(found.model, found.sampling, kept, found.depths)
    if not any(one.steps for one in found.prompts):
        raise UserError("the traces hold no decode step", "trace with max_tokens above 1")
    return found


def capacities(traces: Traces, settings: Simulate) -> tuple[int, ...]:
    """Slots of every layer, checked against the model."""
    asked, layers, experts = settings.capacity, traces.layers, traces.model.experts
    found = (asked,) * layers if isinstance(asked, int) else tuple(asked)
    if len(found) != layers:
        raise UserError(
            f"capacity names {len(found)} layers, and the traces have {layers} with experts",
            "give one number, or one for each",
        )
    require(found, traces.model.top_k)
    if max(found) > experts:
        raise UserError(f"{max(found)} slots for {experts} experts", f"give at most {experts} slots a layer")
    return found


def _predictor(here: _Setting, kind: Kind) -> Fitted:
    settings = here.settings
    if settings.fitted is None or kind not in FITTED:
        found = fit(kind, settings.depth, here.whole)
    else:
        found = choose(Path(settings.fitted).expanduser(), kind, settings.depth)
    unseen(found, here.traces)
    return found


def _beside(here: _Setting) -> dict[Kind, Judged]:
    """The predictors that any other is read beside."""
    found: dict[Kind, Judged] = {}
    for kind in ("chance", "static", "previous-token"):
        if kind in FITTED and here.settings.split != "held-out":
            continue
        made = fit(kind, here.settings.depth, here.whole)
        predicted = ranked(made, here.traces, here.width, here.settings.seed)
        found[kind] = score(here.traces, predicted, here.settings.depth)
    return found


def _figures(here: _Setting, rule: Rule, fitted: Fitted | None, width: int | None = None) -> Figures:
    settings, traces = here.settings, here.traces
    predicted, judged = None, None
    if fitted is not None:
        predicted = ranked(fitted, traces, width or here.width, settings.seed)
        judged = score(traces, predicted, fitted.described.depth)
    popularity: NDArray[np.float32] | None = None
    if rule == "static":
        popularity = counting.frequency(here.whole.of("fit"))
    played = play(traces, here.capacities, rule, settings.between, predicted, popularity, settings.half_life)
    return _counted(here, played, judged, settings.cost)


def _counted(here: _Setting, played: Playing, judged: Judged | None, cost: Cost | None) -> Figures:
    k = here.whole.model.top_k
    tokens = sum(len(one.hits) for one in played.prompts)
    hits = _total(played, lambda one: one.hits)
    issued = _total(played, lambda one: one.issued)
    misses = _total(played, lambda one: one.misses)
    layer_steps = tokens * here.whole.layers
    rate = hits / (layer_steps * k)
    rates = tuple(float(one.hits.mean()) / k if len(one.hits) else 0.0 for one in played.prompts)
    families = {
        family: _mean(rates, [one.family == family and one.steps > 0 for one in here.traces.prompts])
        for family in here.traces.families
    }
    fetched = (misses + issued) / tokens
    times = None
    if cost is not None:
        moved = timed(played.prompts, cost, here.settings.depth)
        needed = _total(played, lambda one: one.used)
        times = Times(
            cost.resident_seconds,
            bounds.serial(cost, here.whole.layers, misses / tokens),
            bounds.overlapped(cost, fetched),
            moved.seconds / tokens,
            moved.late / needed if needed else 0.0,
            fetched * cost.expert_bytes,
            played.wasted / tokens * cost.expert_bytes,
        )
    return Figures(
        hit_rate=rate,
        complete=_total(played, lambda one: one.misses == 0) / layer_steps,
        independent=rate**k,
        misses=misses / tokens,
        fetched=fetched,
        wasted=played.wasted / tokens,
        used=played.first_uses / issued if issued else None,
        predicted=judged,
        families=families,
        prompts=rates,
        times=times,
    )


def _total(played: Playing, of: Callable[[Any], NDArray[Any]]) -> int:
    return sum(int(of(one).sum()) for one in played.prompts)


def _mean(rates: tuple[float, ...], of: list[bool]) -> float:
    """The mean over prompts, each of which counts once."""
    own = [rate for rate, wanted in zip(rates, of, strict=True) if wanted]
    return sum(own) / len(own) if own else 0.0
