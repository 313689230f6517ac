"""`coresident pool train` and `coresident pool evaluate`: the pool as a tool, without a lab.

What is trained, and where to: DIR/run.json says what was asked, DIR/metrics.jsonl what each step and each evaluation
gave, DIR/checkpoints/ holds each learner's state, DIR/learner-K/ its finished adapter, DIR/result.json what became of
all, DIR/log what the processes wrote. Nothing heavy is imported by the process that leads a training.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from coresident import whole
from coresident.engines.pool import inspection
from coresident.engines.pool.base import identity
from coresident.engines.pool.base.base import ensure
from coresident.engines.pool.base.tensors import header
from coresident.engines.pool.card import device_rules
from coresident.engines.pool.findings import Findings
from coresident.engines.pool.learning.outputs import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    STOP,
    WEIGHTS,
    check_start,
    checkpoint,
    noted,
    origin,
    steps_of,
    take_over,
)
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.processes.crew import Casualty
from coresident.engines.pool.progress import Watch
from coresident.engines.pool.run import drive
from coresident.errors import MachineError, UserError, interruptible
from coresident.held import held
from coresident.workload import Reporter

RUN, RESULT, LOG = "run.json", "result.json", "log"
# What a start that failed leaves.
BEFORE_A_STEP = frozenset({LOG, STOP, "job.json", "events"})
# What may be otherwise when a training goes on: it changes no number (or is checked where it could).
MAY_CHANGE = frozenset(
    {
        "sharing", "schedule", "base", "data", "reference", "checkpointing", "steps", "checkpoint_every",
        "eval_files", "eval_every", "on_failure", "cpus", "mps", "device_memory", "page_cache", "step",
    }
)  # fmt: skip


def train(
    parameters: DPO,
    out: Path,
    device: str,
    resume: bool,
    say: Callable[[str], None],
    now: Callable[[str], None],
) -> dict[str, Any]:
    """Train into the directory `out` and return what `result.json` holds.

    `say` takes lines for the user, `now` the state of the moment. Raises UserError for what cannot be
    trained so, MachineError where it cannot be done here; then nothing that was there is lost.
    """
    if not parameters.checkpoint_every:
        raise UserError("checkpoint_every is 0", "say after how many steps to keep each learner's state")
    _check_free(out, resume)
    # All that can be refused is, before anything is written.
    if resume:
        _check_same(saved(out), parameters)
    device_rules.check_on(parameters, device)
    inspection.inspect(parameters)
    base = identity.of_base(ensure(parameters.base, parameters.dtype))
    if resume:
        _check_base(out, base)
        if (before := finished(out, parameters)) is not None:
            say("every learner is trained already: nothing is left to do")
            return before
    if parameters.start_from is not None:
        check_start(parameters, base)
    with _locked(out, resume), interruptible(lambda: _how_on(out)):
        whole.write_json(out / RUN, {"parameters": parameters.model_dump(mode="json"), "base": base})
        (out / STOP).unlink(missing_ok=True)
        (out / RESULT).unlink(missing_ok=True)
        take_over(out)
        _trim(out, parameters)
        with _stopping(out, say) as stopped, _logged(out / LOG), Watch(out, parameters, say, now):
            found, failed = _started(parameters, out, device, resume)
        result = _result(parameters, out, found, failed, bool(stopped))
        whole.write_json(out / RESULT, result)
    (out / STOP).unlink(missing_ok=True)
    return result


def evaluate(parameters: DPO, adapter: Path, file: Path, device: str) -> dict[str, float]:
    """What the adapter does on the data in `file`: `loss`, rewards, `margin` and `accuracy` as training reports them
    (for SFT the `loss` alone), `tokens`, and how many of them were `scored`.

    Raises UserError for an adapter that belongs to another base, and for bad data.
    """
    if device != "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    import torch

    from coresident.engines.pool.base import base, identity, limits, loading
    from coresident.engines.pool.learning import data, evaluation, model
    from coresident.engines.pool.learning.adapter import load
    from coresident.engines.pool.learning.scoring import Scorer
    from coresident.engines.pool.learning.tokenized import tokenize
    from coresident.text import tokenizer

    limits.check(parameters)
    torch.set_num_threads(parameters.threads)
    directory = base.ensure(parameters.base, parameters.dtype)
    held_out = tokenize(data.read(parameters, file), tokenizer.load(directory.path), parameters)
    policy = model.build_on_meta(directory.path, parameters)
    place = torch.device("cpu")
    if device == "cpu":
        tensors = loading.private(directory, parameters.dtype)
    else:
        from coresident.engines.pool.card import device as cards

        place = cards.start(parameters.dtype)
        tensors = cards.load(directory.layout(parameters.dtype), place).tensors()
    model.attach(policy, tensors, parameters)
    load(policy, adapter, identity.of_base(directory))
    parts = evaluation.in_batches(held_out, parameters, place)
    return evaluation.evaluate(Scorer.of(policy), parts, parameters, [None] * len(parts))


def saved(out: Path) -> DPO:
    """What was asked of the training in `out`. Raises UserError where there is none."""
    return _saved(out)[0]


def _saved(out: Path) -> tuple[DPO, str]:
    """What was asked, and the identity of the base then."""
    file = out / RUN
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
        return DPO.model_validate_json(json.dumps(described["parameters"])), str(described["base"])
    except FileNotFoundError:
        raise UserError(
            f"{out} holds no training to resume ({RUN} is not there)", "leave out --resume, or name its --out"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} cannot be used: {' '.join(str(error).split())}", "choose another --out to start anew"
        ) from None


def _check_same(before: DPO, now: DPO) -> None:
    for name in DPO.model_fields:
        was, is_now = getattr(before, name), getattr(now, name)
        if was != is_now and name not in MAY_CHANGE:
            raise UserError(
                f"--resume: {name} was {was} and is now {is_now}",
                f"set {name} back to go on, or choose another --out to start anew",
            )
    if now.steps < before.steps:
        raise UserError(
            f"--resume: {before.steps} steps were asked for, and {now.steps} are fewer",
            f"ask for at least {before.steps} steps",
        )


def _check_base(out: Path, base: str) -> None:
    if _saved(out)[1] != base:
        raise UserError(
            f"--resume: the base has changed since the training in {out} was started",
            "give the base it was started with, unchanged, or start anew in another --out",
        )


def _check_free(out: Path, resume: bool) -> None:
    if resume:
        saved(out)
        return
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out} is no directory", "choose another --out; nothing was changed")
    names = sorted(one.name for one in out.iterdir() if not one.name.startswith("."))
    if any(name in names for name in (RUN, METRICS, RESULT, CHECKPOINTS)):
        remedy = "add --resume to go on with it, or choose another --out; nothing was changed"
        raise UserError(f"{out} holds a training already", remedy)
    if strangers := [name for name in names if name not in BEFORE_A_STEP]:
        raise UserError(
            f"{out} holds {strangers[0]!r} and no training",
            "give a new --out, or an empty one; nothing was changed",
        )


@contextlib.contextmanager
def _locked(out: Path, resume: bool) -> Iterator[None]:
    """`out` as this process's own: a new directory, or one that holds a training to go on with."""
    with held(out):
        # Another process may have begun one since it was looked at.
        _check_free(out, resume)
        yield


def _how_on(out: Path) -> str:
    if not (out / RUN).is_file():
        return "repeat the command"
    if not any((out / CHECKPOINTS).glob("learner-*.safetensors")):
        return "no state is kept, so that --resume begins anew"
    return "go on with --resume, each learner from the state it kept last"


def _started(
    parameters: DPO, out: Path, device: str, resume: bool
) -> tuple[Findings | None, dict[str, Casualty]]:
    """Lead the pool. One that fails before any learner learned leaves no training, so that the command can be repeated."""
    try:
        return _driven(parameters, out, device)
    except MachineError as error:
        if not resume and not (out / METRICS).exists() and not (out / CHECKPOINTS).exists():
            (out / RUN).unlink(missing_ok=True)
        remedy = error.remedy.replace("the cell's log", str(out / LOG))
        raise MachineError(
            error.problem, remedy if remedy == error.remedy else f"{remedy}; {_how_on(out)}"
        ) from error


def finished(out: Path, parameters: DPO) -> dict[str, Any] | None:
    """What `result.json` says where it is the end of this very training and every adapter is there; None where it goes on."""
    try:
        told = json.loads((out / RESULT).read_text(encoding="utf-8"))
        statuses = [one["status"] for one in told["learners"]]
        adapters = [out / one["adapter"] for one in told["learners"] if one["adapter"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if statuses != ["done"] * parameters.learners or saved(out) != parameters:
        return None
    try:
        there = [bool(header(adapter / WEIGHTS)) and (adapter / CONFIG).is_file() for adapter in adapters]
    except (UserError, OSError):
        return None
    return dict(told) if len(there) == parameters.learners and all(there) else None


def _driven(parameters: DPO, out: Path, device: str) -> tuple[Findings | None, dict[str, Casualty]]:
    """Lead the pool. A training of which no learner is left is a result too."""
    cell = Reporter(events=out / "events", work=out, device=device)
    try:
        found = drive(parameters, cell)
    except (MemoryError, FloatingPointError) as error:
        status = "oom" if isinstance(error, MemoryError) else "nonfinite"
        member, _, reason = str(error).partition(": ")
        return None, {member: Casualty(member, status, reason)}
    return found, found.failed


def _result(
    parameters: DPO, out: Path, found: Findings | None, failed: Mapping[str, Casualty], stopped: bool
) -> dict[str, Any]:
    evaluations = {
        line["learner"]: line["evaluation"] | {"step": line["step"]}
        for line in lines(out / METRICS)
        if "evaluation" in line
    }
    learners: list[dict[str, Any]] = []
    for number in range(parameters.learners):
        told: dict[str, Any] = {"learner": number}
        casualty = failed.get(f"learner {number}")
        learned = None if found is None else found.learned.get(number)
        if learned is not None:
            done = learned.steps >= learned.planned
            told |= {"status": "done" if done else "stopped", "steps": learned.steps}
            told |= {"first_loss": learned.first_loss, "last_loss": learned.last_loss}
            told |= {"adapter": f"learner-{number}" if done else None, "digest": learned.adapter}
            told |= {"evaluation": evaluations.get(number)}
        elif casualty is not None:
            told |= {"status": casualty.status, "reason": casualty.reason}
        else:
            told |= {"status": "failed", "reason": "the pool ended before it did"}
        learners.append(told)
    return {"stopped": stopped, "learners": learners}


@contextlib.contextmanager
def _stopping(out: Path, say: Callable[[str], None]) -> Iterator[list[int]]:
    """The first interrupt or SIGTERM asks learners to keep their state and leave; a second ends everything now."""
    caught: list[int] = []

    def ask(number: int, _: Any) -> None:
        caught.append(number)
        if len(caught) > 1:
            raise KeyboardInterrupt
        (out / STOP).touch()
        say("stopping: each learner keeps its state after its current step (again: stop now)")

    before = {one: signal.signal(one, ask) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextlib.contextmanager
def _logged(file: Path) -> Iterator[None]:
    """Whatever processes write from here on goes to a file: the terminal is for the progress."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with file.open("ab") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)


def _trim(out: Path, parameters: DPO) -> None:
    """Take out of the metrics what each learner did after the state it goes on from: it will do it again."""
    file = out / METRICS
    if not file.is_file():
        return
    done = [steps_of(checkpoint(out, number)) for number in range(parameters.learners)]
    exported = [origin(out / f"learner-{number}").get("steps", 0) for number in range(parameters.learners)]

    def counts(line: dict[str, Any]) -> bool:
        number, step = line["learner"], line["step"]
        # The last evaluation belongs to an export, which is still to come where it is not there.
        last = "evaluation" in line and step == parameters.of(number).steps != exported[number]
        return bool(step <= done[number]) and not last

    kept = [line for line in lines(file) if counts(line)]
    whole.write(file, "".join(json.dumps(line) + "\n" for line in kept))


def lines(file: Path) -> list[dict[str, Any]]:
    """What the metrics in a file say."""
    return noted(file.read_bytes().rpartition(b"\n")[0]) if file.is_file() else []
