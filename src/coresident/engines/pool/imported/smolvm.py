"""`coresident import smolvm DIR`: the published results of smolvm's harness, with what its summary passes over said.

Its summary counts NaN learners as done, prints failed controls and still counts them, and pools sharing with copies, step
counts and drivers. Here each of them is a status or a control, and what was asked and what could change the numbers unasked
tell results apart. Its tokens are padded ones (steps x batch x length), so they are not called tokens here.
"""

from __future__ import annotations

import datetime
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from coresident.engines.pool.imported import seeds
from coresident.engines.pool.imported.published import Published, PublishedLearner, read
from coresident.errors import UserError
from coresident.importing import Imported, ImportedControl, Importer

MIB = 2**20
USUAL = (2, 256)
_STAMP = re.compile(r"_(\d{8})-(\d{6})_")


def results(directory: Path) -> list[Imported]:
    """All result files (`*.json`) of a directory, in the order of time. Raises `UserError` where there is none."""
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory", "give the directory of the harness's result files")
    found = {file: read(file) for file in sorted(directory.glob("*.json"))}
    if not found:
        raise UserError(
            f"{directory} holds no result file (*.json)",
            "give the directory that smolvm's bench.sh writes to (bench/results)",
        )
    known: dict[bytes, Path] = {}
    for file in found:
        # A copy would count as a repetition, and agree with itself.
        first = known.setdefault(file.read_bytes(), file)
        if first != file:
            raise UserError(f"{file} is the same result as {first.name}", "move one of them away")
    agreed = seeds.compare({file.stem: result for file, result in found.items()})
    imported = [_imported(file, result, agreed[file.stem]) for file, result in found.items()]
    return sorted(imported, key=lambda one: (one.started, one.file.name))


def _imported(file: Path, result: Published, seed_control: ImportedControl) -> Imported:
    status, reason = _outcome(result)
    learners = sorted(result.learners, key=lambda one: _number(one.lid))
    parameters = {
        "learners": result.n,
        "steps": result.steps,
        "batch": result.batch,
        "max_length": result.maxseq,
        "cpus": result.cpus_per_learner,
        "page_cache": "cold" if result.cold_cache else "warm",
        "share": _share(result),
        "alloc_conf": result.alloc_conf,
    }
    # The harness's usual batch of 2 x 256 goes without saying; the cell's hash covers everything.
    unusual = ["batch", "max_length"] if (result.batch, result.maxseq) != USUAL else []
    shown = ("learners", "steps", *unusual, *(["share"] if result.arm == "fork" else []))
    return Imported(
        file=file,
        arm=result.arm,
        factors={name: parameters[name] for name in shown},
        parameters=parameters,
        conditions={name: str(value) for name, value in sorted(result.env.items())},
        status=status,
        reason=reason,
        started=_started(file),
        duration=result.wall_s,
        metrics=_metrics(result),
        samples=_samples(result),
        series=_series(learners),
        controls=[*_controls(result), seed_control],
        environment=dict(result.env),
    )


def _outcome(result: Published) -> tuple[Literal["ok", "failed", "nonfinite"], str]:
    """The status and why: learners that are missing come first, since of them nothing is known."""
    seen = [one.lid for one in result.learners]
    missing = [str(number) for number in range(result.n) if str(number) not in seen]
    bad = [one.lid for one in result.learners if not one.finite]
    said = []
    if missing:
        said.append(
            f"{len(missing)} of {result.n} learners did not end: {', '.join(missing)}"
            f" (the card held {_mib(result)} MiB at its fullest)"
        )
    if len(set(seen)) != len(seen) or len(seen) + len(missing) != result.n:
        said.append(
            f"its learners are {', '.join(seen)}, and 0 to {result.n - 1} were to be there, each once"
        )
    status: Literal["ok", "failed", "nonfinite"] = "failed" if said else "nonfinite" if bad else "ok"
    if bad:
        said.append(f"the loss of learner {', '.join(sorted(bad, key=_number))} is not finite")
    return status, "; ".join(said)


def _metrics(result: Published) -> dict[str, tuple[float, str]]:
    """What can be said in our terms; rates are total work over the longest learner's training, all having started at once."""
    done = [one for one in result.learners if one.finite]
    found: dict[str, tuple[float | None, str]] = {
        "wall_seconds": (result.wall_s, "s"),
        "base_ready_seconds": (result.golden_load_s, "s"),
        "fork_seconds": (result.fork_s, "s"),
        "device_peak_used_mib": (result.peak_gpu_mib, "MiB"),
        "learners_done": (float(len(done)), "1"),
        "summed_padded_tokens_per_second": (result.agg_tok_s, "1/s"),
    }
    windows = [one.train_s for one in done if one.train_s is not None and one.train_s > 0]
    if windows and len(windows) == len(result.learners):
        pairs = result.steps * result.batch * len(windows) / max(windows)
        found["pairs_per_second"] = (pairs, "1/s")
        found["padded_tokens_per_second"] = (pairs * result.maxseq, "1/s")
    steps = [one.step_ms for one in done if one.step_ms is not None]
    found["step_ms"] = (statistics.median(steps) if steps else None, "ms")
    if done and len(done) == len(result.learners):
        found["first_loss"] = (statistics.mean(one.loss0 or 0.0 for one in done), "nat")
        found["last_loss"] = (statistics.mean(one.lossN or 0.0 for one in done), "nat")
    return {
        name: (float(value), unit)
        for name, (value, unit) in found.items()
        if value is not None and math.isfinite(value)
    }


def _samples(result: Published) -> dict[str, list[float]]:
    steps = [one.step_ms for one in result.learners if one.finite and one.step_ms is not None]
    return {"step_ms": steps} if steps else {}


def _series(learners: Sequence[PublishedLearner]) -> dict[str, list[float | None]]:
    found: dict[str, list[float | None]] = {}
    for one in learners:
        name = f"learner-{one.lid}"
        found[f"{name}.first_and_last_loss"] = [_finite(one.loss0), _finite(one.lossN)]
        if _finite(one.peak_gb) is not None:
            found[f"{name}.peak_memory_mib"] = [round((one.peak_gb or 0.0) * 1e9 / MIB, 1)]
    return found


def _controls(result: Published) -> list[ImportedControl]:
    found = [_finite_control(result)]
    if result.arm == "fork":
        found.append(_sharing(result))
    if result.cpus_per_learner and result.arm == "native":
        asked, cores = result.n * result.cpus_per_learner, result.env.get("host_cores")
        wraps = isinstance(cores, int) and asked > cores
        reason = (
            f"{asked} cores were asked of a host with {cores}: learners shared cores"
            if wraps
            else "the cores that learners had were not read back"
        )
        found.append(ImportedControl("pinned-cpus", f"{result.cpus_per_learner} each", None, None, reason))
    if result.cold_cache:
        reason = "whether the page cache was dropped is not said: the harness records `cold` also where that failed"
        found.append(ImportedControl("page-cache", "cold", None, None, reason))
    return found


def _finite_control(result: Published) -> ImportedControl:
    bad = sorted((one.lid for one in result.learners if not one.finite), key=_number)
    ran = {"learners": len(result.learners), "not finite": bad}
    reason = (
        f"the loss of learner {', '.join(bad)} is not finite, and its harness counts it as done"
        if bad
        else ""
    )
    return ImportedControl("finite", "finite", ran, not bad, reason)


def _sharing(result: Published) -> ImportedControl:
    """Whether clones shared their weights: by the daemon's count where the file has it, else by the card's memory.

    Clones are always forked with `--share-weights`; only `off` asks for copies. A learner's own peak counts the base: where
    the card held the sum of all of them, each had a base of its own.
    """
    asked = _share(result)
    peaks = [one.peak_gb for one in result.learners if one.peak_gb is not None]
    # Of those that are known: all of them hold as much or more.
    private = sum(peaks) * 1e9 / MIB
    ran: dict[str, Any] = {
        "device_peak_used_mib": result.peak_gpu_mib,
        "sum_of_learners_peaks_mib": round(private),
    }
    if re.fullmatch(r"[0-9]{1,18}", result.shared_ranges):
        ran["shared_ranges"] = int(result.shared_ranges)
        engaged = int(result.shared_ranges) > 0
    elif (
        len(peaks) < 2
        or result.peak_gpu_mib is None
        or (len(peaks) < result.n and result.peak_gpu_mib >= private)
    ):
        return ImportedControl(
            "sharing-engaged", asked, ran, None, "too little is said of its learners' memory"
        )
    else:
        engaged = result.peak_gpu_mib < private
    if asked == "off":
        reason = "copies were asked for, and weights were shared" if engaged else ""
        return ImportedControl("sharing-engaged", asked, ran, not engaged, reason)
    reason = ""
    if not engaged:
        reason = (
            f"sharing did not engage: the card held {_mib(result)} MiB, and {result.n} learners with a base"
            f" each would hold {private:.0f}"
            if "shared_ranges" not in ran
            else "sharing did not engage: the daemon shared 0 ranges"
        )
    return ImportedControl("sharing-engaged", asked, ran, engaged, reason)


def _share(result: Published) -> str:
    if result.share_mode in ("on", "off", "default"):
        return result.share_mode
    return {"1": "on", "0": "off"}.get(result.share_weights_env, "default")


def _started(file: Path) -> str:
    """The time in the file's name (its host's zone is not said; taken as UTC), else when the file was written."""
    found = _STAMP.search(file.name)
    if found is not None:
        try:
            return datetime.datetime.strptime("".join(found.groups()), "%Y%m%d%H%M%S").isoformat() + "+00:00"
        except ValueError:
            pass
    written = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.UTC)
    return written.isoformat(timespec="seconds")


def _mib(result: Published) -> str:
    return "an unknown number of" if result.peak_gpu_mib is None else f"{result.peak_gpu_mib:.0f}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _number(lid: str) -> tuple[int, str]:
    return (int(lid), lid) if re.fullmatch(r"[0-9]{1,9}", lid) else (1 << 30, lid)


smolvm = Importer(
    name="smolvm",
    about="result files of smolvm's fork-pool harness (bench/results/*.json)",
    workload="pool.dpo",
    read=results,
)
