"""What surrounds a learner's steps where they are to last: it goes on from where it was, is kept every so often, is
evaluated on held-out data, writes down what it does, and stops between two steps when it is told to.

A measured cell asks for none of it, and then a session is its learner and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coresident.engines.pool.base import base, identity
from coresident.engines.pool.job import Job
from coresident.engines.pool.learning import adapter, checkpoints, data, evaluation, outputs
from coresident.engines.pool.learning.learner import Learner, NonFinite, StepResult
from coresident.engines.pool.learning.tokenized import Tokenized, batches, planned
from coresident.engines.pool.parameters import DPO

if TYPE_CHECKING:
    from torch import nn


@dataclass
class Session:
    """One learner's training. `origin` says which base its adapter belongs to (empty where nothing is kept); `kept` is
    the last step of which a checkpoint exists; `planned` is how many steps there are.
    """

    learner: Learner
    settings: DPO
    number: int
    work: Path
    origin: str
    belongs: Mapping[str, str]
    evaluate: Callable[[], dict[str, float]] | None
    planned: int
    kept: int = 0

    @property
    def lasting(self) -> bool:
        """Whether this is a training that is kept, not only measured."""
        return self.settings.checkpoint_every > 0

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.learner.steps >= self.planned

    @property
    def over(self) -> bool:
        """Whether there is no step to do now: all are done, or it was told to stop."""
        return self.finished or (self.lasting and (self.work / outputs.STOP).exists())

    def step(self) -> StepResult:
        """Train one step, and do whatever is due after it."""
        result = self.learner.step()
        if not self.lasting:
            return result
        outputs.note_step(self.work, self.number, result)
        due = self.settings.eval_every
        if due and result.step % due == 0 and not self.finished:
            self._evaluated()
        if result.step % self.settings.checkpoint_every == 0 or self.finished:
            self._keep()
        return result

    @contextmanager
    def rescued(self) -> Iterator[None]:
        """If the training in the block is no longer finite, its adapter is kept as it was before that step."""
        try:
            yield
        except NonFinite:
            out = outputs.last_good(self.work, self.number)
            told = {"steps": self.learner.steps} | ({"base": self.origin} if self.origin else {})
            with suppress(NonFinite):
                adapter.export(self.learner.model, out, told, replace=True)
            raise

    def close(self) -> str:
        """After the last step: keep and export. Returns the adapter's digest."""
        out = self.work / f"learner-{self.number}"
        if not self.lasting:
            return adapter.export(self.learner.model, out)
        if self.kept < self.learner.steps:
            self._keep()
        told = {"base": self.origin, "steps": self.learner.steps}
        if not self.finished or outputs.origin(out) == told:
            return adapter.digest(adapter.adapter_tensors(self.learner.model))
        # First, so that an adapter that is there has been evaluated.
        self._evaluated()
        return adapter.export(self.learner.model, out, told, replace=True)

    def _keep(self) -> None:
        checkpoints.save(outputs.checkpoint(self.work, self.number), self.learner, self.belongs)
        self.kept = self.learner.steps

    def _evaluated(self) -> None:
        if self.evaluate is not None:
            line = {"learner": self.number, "step": self.learner.steps, "evaluation": self.evaluate()}
            outputs.note(self.work, line)


def begin(
    job: Job, number: int, model: nn.Module, shard: Tokenized, checksum: str, tokenizer: Any
) -> Session:
    """Learner `number` over the attached `model`, whose base has this checksum: from its checkpoint in the job's
    place if it has one, else from `start_from`, else new.

    Raises UserError for a checkpoint or an adapter that belongs to something else.
    """
    settings, work = job.parameters.of(number), Path(job.work)
    asked = settings.checkpoint_every > 0 or settings.start_from is not None
    origin = identity.of_base(base.read(Path(job.base))) if asked else ""
    if settings.start_from is not None:
        start(model, settings, origin)
    held = f"{'card' if job.on_card else 'host'} {checksum}"
    belongs = checkpoints.identity(settings, shard, held)
    file = outputs.checkpoint(work, number)
    done = outputs.steps_of(file) if settings.checkpoint_every else 0
    learner = Learner(model, batches(shard, settings, number, done), settings)
    evaluate = _evaluator(learner, settings, number, tokenizer)
    if done:
        checkpoints.restore(file, learner, belongs)
    return Session(
        learner, settings, number, work, origin, belongs, evaluate, planned(shard, settings), kept=done
    )


def start(model: nn.Module, settings: DPO, origin: str) -> None:
    """Give the policy over the base `origin` the values of `settings.start_from`. Raises UserError where it belongs to
    another base, does not fit, or is not zero while it is unsaid what the policy is held to.
    """
    outputs.check_start(settings, origin)
    adapter.load(model, Path(settings.start_from or ""), origin)


def _evaluator(
    learner: Learner, settings: DPO, number: int, tokenizer: Any
) -> Callable[[], dict[str, float]] | None:
    held_out = data.held_out(settings, number, tokenizer)
    if held_out is None:
        return None
    device = next(learner.model.parameters()).device
    parts = evaluation.in_batches(held_out, settings, device)
    # Here, where the policy still is the one that it is held to.
    known = [None if settings.loss == "sft" else learner.reference(part) for part in parts]
    return lambda: evaluation.evaluate(learner.scorer, parts, settings, known)
