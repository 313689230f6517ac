"""What one attempt amounts to: its status, and why, from how the process ended and what it reported."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping

from coresident.lab.records.schema import Status
from coresident.lab.run.process.supervise import Outcome
from coresident.lab.run.reported.events import Observed


def conclude(
    outcome: Outcome,
    observed: Observed,
    required: Collection[str] = (),
    *,
    by_exit: bool = False,
    workers: int = 1,
    failed_controls: Mapping[str, str] | None = None,
) -> tuple[Status, str]:
    """The status of an attempt and one sentence that says why (for `ok` it is empty, or a remark).

    `required` are the metrics without which the attempt is worthless (those that hypotheses name and that are
    not built in). `by_exit`: exit code 0 says that all is done, as for a foreign command; otherwise only the
    event `done` does. `workers` is how many the cell was asked to run at once: where any reports its window,
    all must. `failed_controls` gives the reason of each control that failed.

    The first that applies counts: interrupted; ended by the lab (a failure that was reported before that
    comes first); a failure reported by the cell; killed for want of memory, or otherwise; a value that is not
    finite; an exit code; a line that cannot be trusted; no `done`; a torn line; a missing worker; a missing
    metric; a failed control.
    """
    if outcome.interrupted:
        return "interrupted", "the run was asked to stop now"
    failure = _reported(outcome, observed) or _ended(outcome)
    if failure is not None:
        status, reason = failure
        if outcome.oom_kills and status == "failed" and not outcome.problem:
            return "oom", f"the kernel killed for want of memory while it ran; {reason}"
        return status, reason
    if observed.nonfinite:
        return "nonfinite", _first(observed.nonfinite)
    if outcome.exit_code != 0:
        if outcome.oom_kills:
            return "oom", f"the kernel killed for want of memory while it ran; exit code {outcome.exit_code}"
        return (
            "failed",
            f"exit code {outcome.exit_code}{' although it reported done' if observed.done else ''}",
        )
    if observed.faults:
        return "failed", _first(observed.faults)
    if not observed.done and not by_exit:
        return (
            "failed",
            "it ended without reporting that all is done (no `done` event), although its exit code is 0",
        )
    if observed.torn:
        return "failed", _first(observed.torn)
    if 0 < len(observed.workers) < workers:
        return "failed", f"{len(observed.workers)} of its {workers} workers reported"
    missing = sorted(set(required) - observed.metrics.keys())
    if missing:
        names = ", ".join(repr(name) for name in missing)
        return "failed", f"it did not report {names}, which a hypothesis is about"
    if failed_controls:
        return "invalid", "; ".join(f"{name}: {reason}" for name, reason in sorted(failed_controls.items()))
    return "ok", _left_over(outcome)


def _reported(outcome: Outcome, observed: Observed) -> tuple[Status, str] | None:
    """A failure that the cell itself reported, unless it came of being ended."""
    if observed.failed is None:
        return None
    ended = outcome.asked_to_end
    if ended is not None and (observed.failed_at is None or observed.failed_at >= ended):
        return None
    return observed.failed


def _ended(outcome: Outcome) -> tuple[Status, str] | None:
    """How the process ended, if not by an exit code."""
    if outcome.timed_out:
        return "timeout", f"it ran longer than its timeout and was ended after {outcome.wall:.1f} s"
    if outcome.lost:
        return "failed", "its shim was killed from outside, and so was all that ran below it"
    if outcome.problem:
        return "failed", outcome.problem
    if outcome.survivors:
        return (
            "failed",
            f"{outcome.survivors} of its processes could not be killed and may disturb what runs next",
        )
    if outcome.signal is None:
        return None
    name = _name(outcome.signal)
    if outcome.signal == signal.SIGKILL and not outcome.oom_kills:
        counter = "no counter can be read" if outcome.oom_kills is None else "its counter does not say so"
        return "failed", f"killed by SIGKILL, perhaps by the kernel for want of memory ({counter})"
    return "failed", f"killed by {name}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _left_over(outcome: Outcome) -> str:
    if not outcome.leftovers:
        return ""
    return f"processes still running when it ended: {outcome.leftovers}; they were ended"


def _first(sentences: list[str]) -> str:
    return sentences[0] if len(sentences) == 1 else f"{sentences[0]} (and {len(sentences) - 1} more)"
