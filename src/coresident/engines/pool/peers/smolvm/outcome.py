"""What a pool of smolvm's came to, told in the terms of the other arms where they mean the same, and in no other.

Its harness counts steps x batch x length as tokens, padding included, and a learner whose loss is NaN as done: here padded
tokens are called so, pairs a second compare it with the other arms, and NaN is an outcome.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.peers.smolvm.coordination import Done
from coresident.engines.pool.sharing import page_cache
from coresident.engines.pool.sharing.sharing import Decision
from coresident.workload import Reporter

MIB = 2**20


@dataclass
class Seen:
    """What the host saw: monotonic seconds of each learner's `ready` and `done`, and what it said at its end.

    `ranges` are the weight ranges that the daemon shared and kept private (None: it did not say), `cached` the share of the
    model's pages in the page cache, `device_bytes` what the whole card held more than before (None: no card).
    """

    golden_seconds: float = 0.0
    fork_seconds: float = 0.0
    cached: float = 1.0
    device_bytes: int | None = None
    ranges: tuple[int, int] | None = None
    ready: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    done: dict[int, Done] = field(default_factory=dict)


def report(parameters: DPO, seen: Seen, share: str, cell: Reporter) -> None:
    """Tell the cell everything; every learner is done. Raises FloatingPointError naming those whose loss is no number."""
    _controls(parameters, seen, share, cell)
    pairs = parameters.steps * parameters.batch
    for number, one in sorted(seen.done.items()):
        name = f"learner-{number}"
        cell.series(f"{name}.first_and_last_loss", [one.first_loss, one.last_loss])
        if one.peak_gb is not None:
            cell.series(f"{name}.peak_memory_mib", [one.peak_gb * 1e9 / MIB])
        cell.worker(name, seen.ready[number], seen.ended[number], pairs, "pairs")
    bad = [number for number, one in sorted(seen.done.items()) if not one.finite]
    if bad:
        names = ", ".join(map(str, bad))
        raise FloatingPointError(f"learner {names}: the loss is not finite, and smolvm counts it as done")
    _metrics(parameters, seen, pairs, cell)


def _metrics(parameters: DPO, seen: Seen, pairs: int, cell: Reporter) -> None:
    learned = list(seen.done.values())
    window = max(seen.ended.values()) - min(seen.ready.values())
    cell.metric("pairs_per_second", pairs * len(learned) / window, "1/s")
    cell.metric("padded_tokens_per_second", pairs * parameters.max_length * len(learned) / window, "1/s")
    tokens = [one.tokens for one in learned if one.tokens is not None]
    if len(tokens) == len(learned):
        cell.metric("tokens_per_second", sum(tokens) / window, "1/s")
    for one in learned:
        cell.sample("step_ms", one.step_ms)
    cell.metric("step_ms", statistics.median(one.step_ms for one in learned), "ms")
    cell.metric("learners_done", len(learned), "1")
    cell.metric("first_loss", statistics.mean(one.first_loss for one in learned), "nat")
    cell.metric("last_loss", statistics.mean(one.last_loss for one in learned), "nat")
    cell.metric("base_ready_seconds", seen.golden_seconds, "s")
    cell.metric("fork_seconds", seen.fork_seconds, "s")
    if seen.device_bytes is not None:
        cell.metric("device_memory_mib", seen.device_bytes / MIB, "MiB")


def _controls(parameters: DPO, seen: Seen, share: str, cell: Reporter) -> None:
    told = (
        None if seen.ranges is None else {"shared_ranges": seen.ranges[0], "private_ranges": seen.ranges[1]}
    )
    sharing = shared(share, seen.ranges)
    cell.control("sharing-engaged", share, told, sharing.passed, sharing.reason)
    cached = page_cache.decide(parameters.page_cache, seen.cached)
    resident = {"resident": round(seen.cached, 4)}
    cell.control("page-cache", parameters.page_cache, resident, cached.passed, cached.reason)
    for name, asked, reason in (
        ("base-unchanged", "one checksum", "smolvm's guests take no checksum of their base"),
        ("mps", "off", "smolvm does not say how its workers use the card"),
    ):
        cell.control(name, asked, None, None, reason)


def shared(asked: str, ranges: tuple[int, int] | None) -> Decision:
    """Whether the daemon shared weights as `asked`, by its own last line; None where it wrote none."""
    if ranges is None:
        return Decision(None, "the daemon's log has no line `shared weight ranges`")
    if asked == "on" and ranges[0] == 0:
        return Decision(False, f"sharing did not engage: 0 ranges were shared, {ranges[1]} were private")
    if asked == "off" and ranges[0] > 0:
        return Decision(False, f"copies were asked for, and {ranges[0]} ranges were shared")
    return Decision(True, "")
