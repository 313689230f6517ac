"""What a pool run found, and how it becomes metrics, controls and digests."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.processes.crew import Casualty
from coresident.engines.pool.sharing import device_sharing, page_cache
from coresident.engines.pool.sharing.device_sharing import DeviceHeld, DeviceUse
from coresident.engines.pool.sharing.sharing import Decision, Held, decide
from coresident.workload import Reporter

MIB = 2**20


@dataclass(frozen=True)
class Learned:
    """One learner's result.

    `start` and `end` are monotonic seconds around the steps after the barrier, `tokens` the real tokens in them, `step_ms`
    their median duration, `planned` how many steps there were to be; `before` and `after` are checksums of the base as this
    learner saw it.
    """

    start: float
    end: float
    tokens: int
    step_ms: float
    before: str
    after: str
    adapter: str
    first_loss: float
    last_loss: float
    steps: int
    planned: int = 0


@dataclass
class Findings:
    """All that the driver saw. Times in seconds, memory in bytes, rates in bytes a second; `cached` is the share of
    the base's pages that were in the page cache before the start. `device_use` and `mps` are None on a CPU.
    """

    start: float
    base_bytes: int
    base_ready: float | None = None
    fork: float = 0.0
    first_step: float = 0.0
    learner_start: float = 0.0
    learner_bytes: int = 0
    pool_bytes: int = 0
    memory_unread: bool = False
    together: int = 0
    held: list[Held | None] = field(default_factory=list)
    device_held: list[DeviceHeld] = field(default_factory=list)
    device_use: DeviceUse | None = None
    mps: tuple[dict[str, Any], Decision] | None = None
    golden_to_first_step: float | None = None
    cached: float = 1.0
    raw_rate: float | None = None
    learned: dict[int, Learned] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    failed: dict[str, Casualty] = field(default_factory=dict)


def report(parameters: DPO, found: Findings, cell: Reporter) -> None:
    """Tell the cell everything. Only called when every learner is through."""
    learned = [found.learned[number] for number in sorted(found.learned)]
    if found.failed:
        cell.environment({"failed": {member: one.reason for member, one in found.failed.items()}})
    _metrics(parameters, found, learned, cell)
    _controls(parameters, found, cell)
    unchanged = base_unchanged(found.learned, found.checksums)
    checksums = sorted(
        {one.before for one in learned} | {one.after for one in learned} | set(found.checksums.values())
    )
    cell.control("base-unchanged", "one checksum", checksums, unchanged.passed, unchanged.reason)
    cell.digest("base", learned[0].before)


def _controls(parameters: DPO, found: Findings, cell: Reporter) -> None:
    if found.device_held:
        ran: Any = device_sharing.shown(found.device_held, found.device_use)
        sharing = device_sharing.decide(parameters.sharing, found.device_held, found.device_use)
    else:
        ran, sharing = shown(found.held), decide(parameters.sharing, found.held, found.together)
    cell.control("sharing-engaged", parameters.sharing, ran, sharing.passed, sharing.reason)
    service, ruling = ("off", Decision(True, "")) if found.mps is None else found.mps
    cell.control("mps", parameters.mps, service, ruling.passed, ruling.reason)
    state = page_cache.decide(parameters.page_cache, found.cached)
    share = {"resident": round(found.cached, 4)}
    cell.control("page-cache", parameters.page_cache, share, state.passed, state.reason)


def _metrics(parameters: DPO, found: Findings, learned: Sequence[Learned], cell: Reporter) -> None:
    window = max(one.end for one in learned) - min(one.start for one in learned)
    cell.metric("tokens_per_second", sum(one.tokens for one in learned) / window, "1/s")
    pairs = (
        sum(parameters.of(number).batch * (one.steps - 1) for number, one in found.learned.items()) / window
    )
    cell.metric("pairs_per_second", pairs, "1/s")
    padded = sum(
        parameters.of(number).max_length * parameters.of(number).batch * (one.steps - 1)
        for number, one in found.learned.items()
    )
    cell.metric("padded_tokens_per_second", padded / window, "1/s")
    for one in learned:
        cell.sample("tokens_per_second_per_learner", one.tokens / (one.end - one.start))
        cell.sample("step_ms", one.step_ms)
    speed = statistics.median(one.tokens / (one.end - one.start) for one in learned)
    cell.metric("tokens_per_second_per_learner", speed, "1/s")
    cell.metric("step_ms", statistics.median(one.step_ms for one in learned), "ms")
    cell.metric("learners_done", len(learned), "1")
    cell.metric("first_step_seconds", found.first_step, "s")
    cell.metric("learner_start_seconds", found.learner_start, "s")
    if found.base_ready is not None:
        cell.metric("base_ready_seconds", found.base_ready, "s")
    if found.golden_to_first_step is not None:
        cell.metric("golden_to_first_step_seconds", found.golden_to_first_step, "s")
    if found.raw_rate is not None:
        cell.metric("raw_read_mib_per_second", found.raw_rate / MIB, "MiB/s")
    if found.device_use is not None:
        cell.metric("device_memory_mib", (found.device_use.peak - found.device_use.idle) / MIB, "MiB")
        # A pack is one process of many learners.
        share = parameters.learners // parameters.at_once if parameters.sharing == "packed" else 1
        cell.metric("marginal_device_memory_mib", found.device_use.marginal / share / MIB, "MiB")
    if parameters.sharing in ("fork", "fork-copy"):
        cell.metric("fork_seconds", found.fork, "s")
    if not found.memory_unread:
        cell.metric("learner_memory_mib", found.learner_bytes / MIB, "MiB")
        cell.metric("pool_memory_mib", found.pool_bytes / MIB, "MiB")
    cell.metric("base_mib", found.base_bytes / MIB, "MiB")
    cell.metric("first_loss", statistics.mean(one.first_loss for one in learned), "nat")
    cell.metric("last_loss", statistics.mean(one.last_loss for one in learned), "nat")


def shown(held: Sequence[Held | None]) -> list[Any]:
    """The measured figures in MiB, one entry a learner, None where they could not be read."""
    return [
        None if seen is None else {f"{key}_mib": round(value / MIB, 2) for key, value in asdict(seen).items()}
        for seen in held
    ]


def base_unchanged(learned: Mapping[int, Learned], golden: Mapping[str, str]) -> Decision:
    """Whether every learner saw the same base before and after, and all of them (and the golden process) the
    same one.
    """
    for number, one in sorted(learned.items()):
        if one.before != one.after:
            return Decision(False, f"learner {number}'s base changed while it trained")
    values = {f"learner {number}": one.before for number, one in sorted(learned.items())} | dict(golden)
    first, *others = values.items()
    for name, value in others:
        if value != first[1]:
            return Decision(False, f"{name} saw another base than {first[0]}")
    return Decision(True, "")
