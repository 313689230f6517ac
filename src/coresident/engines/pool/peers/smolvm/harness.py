"""The arm `smolvm`: one golden machine loads the base, N clones share its weights, in the order of its harness.

What the published harness glosses over is a failure here: a clone that could not be forked, one that says nothing until
the timeout, a daemon that dies.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from coresident.engines.pool import sizes
from coresident.engines.pool.card.card import Watch, reader
from coresident.engines.pool.card.device_rules import CPU
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.peers.smolvm import machines, prerequisites
from coresident.engines.pool.peers.smolvm.coordination import Coordination, done
from coresident.engines.pool.peers.smolvm.outcome import Seen, report
from coresident.engines.pool.sharing import page_cache
from coresident.errors import MachineError
from coresident.workload import Reporter

MIB = 2**20
POLL = 0.05
# Above it a card is not clean: a context of a fork run before may have leaked (about 750 MiB).
CLEAN = 500 * MIB


def run(parameters: DPO, cell: Reporter) -> None:
    """Measure smolvm's pool and report it. Raises FloatingPointError naming learners whose loss is no number,
    MachineError naming what else failed. Whatever happens, its machines and its daemon are gone afterwards.
    """
    found = prerequisites.of(parameters)
    wire_hash = prerequisites.check_protocol(found)
    cell.environment(prerequisites.manifest(found, wire_hash))
    with cell.phase("page cache"):
        cached = page_cache.arrange(found.weights, parameters.page_cache)
    watch = _card(cell.device, parameters)
    with _orderly():
        machines.remove_leftovers(found)
        seen = _driven(parameters, found, cell, watch)
    seen.cached = cached
    if watch is not None:
        seen.device_bytes = watch.peak - watch.idle
    report(parameters, seen, found.settings.share, cell)


def _driven(parameters: DPO, found: prerequisites.Prerequisites, cell: Reporter, watch: Watch | None) -> Seen:
    """From the daemon's start to its end."""
    seen = Seen()
    coordination = Coordination(cell.work / "coord", found.workload)
    with machines.daemon(found, coordination.place / "daemon.log") as daemon, ExitStack() as stack:

        def look() -> None:
            daemon.check()
            if watch is not None:
                watch.look()

        start = time.monotonic()
        with cell.phase("golden"):
            stack.enter_context(machines.golden(found, coordination.place, parameters))
            loaded = _golden_ready(coordination, found.settings.golden_seconds, look)
        seen.golden_seconds = time.monotonic() - start
        cell.environment({"smolvm_golden_load_seconds": loaded})
        start = time.monotonic()
        with cell.phase("fork"):
            for number in range(parameters.learners):
                machines.fork(found, number)
                look()
        seen.fork_seconds = time.monotonic() - start
        coordination.go()
        with cell.phase("train"):
            _train(coordination, seen, parameters.learners, found.settings.timeout, look, cell)
        seen.ranges = daemon.shared()
    return seen


@contextmanager
def _orderly() -> Iterator[None]:
    """Let SIGTERM unwind what was started: smolvm keeps a register of machines, which a plain end would leave behind."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _card(device: str, parameters: DPO) -> Watch | None:
    if device == CPU:
        return None
    budget = None if parameters.device_memory is None else sizes.parse(parameters.device_memory)
    watch = Watch(reader(device), budget)
    if watch.idle > CLEAN:
        raise MachineError(
            f"{watch.idle / MIB:.0f} MiB are in use on the card before smolvm starts",
            "end what holds it: a smolvm daemon or clone worker of a run before may",
        )
    return watch


def _golden_ready(coordination: Coordination, limit: float, look: Callable[[], None]) -> float:
    deadline = time.monotonic() + limit
    while (seconds := coordination.golden_seconds) is None:
        look()
        if time.monotonic() > deadline:
            errors = coordination.place / "g.err"
            raise MachineError(
                f"the golden machine was not ready within {limit:g} s{machines.tail(errors)}",
                f"see {errors}; raise smolvm.golden_seconds if it was loading",
            )
        time.sleep(POLL)
    return seconds


def _train(
    coordination: Coordination,
    seen: Seen,
    learners: int,
    limit: float,
    look: Callable[[], None],
    cell: Reporter,
) -> None:
    """Wait for every learner's last word."""
    deadline = time.monotonic() + limit
    while len(seen.done) < learners:
        look()
        now = time.monotonic()
        for number in (number for number in range(learners) if number not in seen.done):
            events = coordination.events(number)
            if "ready" in events or "done" in events:
                seen.ready.setdefault(number, now)
            if "done" in events:
                seen.ended[number], seen.done[number] = now, done(events["done"])
                cell.progress(len(seen.done), learners, "learners")
        if now > deadline:
            raise MachineError(
                _silent(coordination, seen, learners, limit),
                f"see {coordination.place}; or raise smolvm.timeout",
            )
        time.sleep(POLL)


def _silent(coordination: Coordination, seen: Seen, learners: int, limit: float) -> str:
    missing = [number for number in range(learners) if number not in seen.done]
    unclaimed = [number for number in missing if not coordination.claimed(number)]
    said = f"{len(seen.done)} of {learners} learners were done within {limit:g} s: "
    if unclaimed:
        return said + f"{len(unclaimed)} clones never took a number"
    begun = [number for number in missing if number in seen.ready]
    which = begun or missing
    names = ", ".join(map(str, which[:8]))
    return said + f"learner {names} {'began and did not end' if begun else 'said nothing'}"
