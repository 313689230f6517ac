"""A pack as a job describes it: its learners' data, where they start or go on, and where their states and adapters are kept."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coresident.engines.pool.base import base, identity
from coresident.engines.pool.job import Job
from coresident.engines.pool.learning import adapter, checkpoints, data, outputs
from coresident.engines.pool.learning.tokenized import Tokenized, batches, planned
from coresident.engines.pool.packed import kinds
from coresident.engines.pool.packed.arena import draw
from coresident.engines.pool.packed.pack import Pack, Plan
from coresident.engines.pool.packed.policy import Policy
from coresident.engines.pool.packed.state import State
from coresident.engines.pool.parameters import DPO

if TYPE_CHECKING:
    from torch import Tensor, nn

    from coresident.engines.pool.learning.learner import StepResult


@dataclass
class Session:
    """A pack's training. `origin` says which base its adapters belong to (empty where nothing is kept); `belongs` what each
    learner's checkpoint belongs to, and `kept` the last step of which there is one.
    """

    job: Job
    pack: Pack
    origin: str
    belongs: Sequence[dict[str, str]]
    kept: list[int]

    @property
    def lasting(self) -> bool:
        """Whether this is a training that is kept, not only measured."""
        return self.job.parameters.checkpoint_every > 0

    @property
    def over(self) -> bool:
        """Whether there is no step to do now: all are done, or it was told to stop."""
        return self.pack.over or (self.lasting and (Path(self.job.work) / outputs.STOP).exists())

    def step(self) -> list[tuple[int, StepResult]]:
        """One step of every learner that has one left, and whatever is due after it. Returns what `Pack.step` does."""
        results = self.pack.step()
        if not self.lasting:
            return results
        due = self._due()
        if due:
            results += self.pack.settle()
        self._note(results)
        if due:
            self._keep()
        return results

    def settle(self) -> list[tuple[int, StepResult]]:
        """Wait until all is done that the device was told."""
        results = self.pack.settle()
        if self.lasting:
            self._note(results)
        return results

    def close(self) -> None:
        """After the last step: whoever is not kept as it is now is kept, and adapters are at hand."""
        if self.lasting:
            self._keep()
        self.pack.close()

    def export(self, number: int, described: str) -> str:
        """Write what a learner learned, if its steps are done; of one that stopped, the last adapter that was good, beside.
        Returns its digest.
        """
        work, pack = Path(self.job.work), self.pack
        told: dict[str, Any] = {"base": self.origin} if self.origin else {}
        told["steps"] = len(pack.series[number]["loss"])
        if number in pack.failed:
            out = outputs.last_good(work, number)
            return adapter.write(pack.finished[number], described, out, told, replace=True)
        out = work / f"learner-{number}"
        if not self.lasting:
            return adapter.write(pack.finished[number], described, out)
        if told["steps"] < pack.planned(number) or outputs.origin(out) == told:
            return adapter.digest(pack.finished[number])
        return adapter.write(pack.finished[number], described, out, told, replace=True)

    def _due(self) -> bool:
        """Whether states are to be kept: every so many steps of the learner that is furthest, and at any learner's end."""
        reached = {number: self.pack.reached(number) for number in self.pack.members}
        ended = any(self.kept[number] < step == self.pack.planned(number) for number, step in reached.items())
        return ended or max(reached.values()) % self.job.parameters.checkpoint_every == 0

    def _keep(self) -> None:
        """All at once, whoever's are due: from states of different steps learners would go on side by side with others' rows
        than before.
        """
        work, pack = Path(self.job.work), self.pack
        # One that stopped is kept as it was before, and stops again if it goes on from there.
        numbers = [
            number
            for number in pack.members
            if number not in pack.failed and pack.reached(number) > self.kept[number]
        ]
        for number in numbers:
            state, file = pack.state(number), outputs.next_checkpoint(work, number)
            checkpoints.write(file, state.tensors, state.series, self.belongs[number])
            self.kept[number] = state.steps
        if numbers:
            outputs.take_over(work, complete=True)

    def _note(self, results: Iterable[tuple[int, StepResult]]) -> None:
        for number, result in results:
            outputs.note_step(Path(self.job.work), number, result)


def shards(settings: DPO, tokenizer: Any) -> list[Tokenized]:
    """Each learner's data."""
    return [data.tokens(settings.of(number), number, tokenizer) for number in range(settings.learners)]


def begin(job: Job, model: nn.Module, shards: Sequence[Tokenized], checksum: str) -> Session:
    """The pack over an attached model, whose base has this checksum: each learner from its checkpoint in the job's place if it
    has one, else from `start_from`, else new.

    Raises UserError for a base that cannot be packed, or a checkpoint or an adapter that belongs to something else.
    """
    settings, work = job.parameters, Path(job.work)
    policy = Policy(model)
    policy.check(max(settings.of(number).max_length for number in range(settings.learners)))
    lasting = settings.checkpoint_every > 0
    if lasting:
        outputs.take_over(work)
    asked = lasting or settings.start_from is not None
    origin = identity.of_base(base.read(Path(job.base))) if asked else ""
    held = f"{'card' if job.on_card else 'host'} {checksum}"
    known: dict[tuple[int, int], dict[str, Tensor]] = {}
    plans, belongs = [], []
    for number, shard in enumerate(shards):
        own = settings.of(number)
        if settings.start_from is not None:
            outputs.check_start(own, origin)
            start = adapter.read(Path(settings.start_from))
        else:
            start = known.setdefault((own.rank, own.seed), {}) or draw(policy.layers, own.rank, own.seed)
            known[own.rank, own.seed] = start
        belongs.append(_belongs(own, shard, held))
        kept = _kept(outputs.checkpoint(work, number), belongs[-1]) if lasting else None
        done = 0 if kept is None else kept.steps
        plans.append(Plan(own, planned(shard, own), batches(shard, own, number, done), start, kept))
    pack = Pack(policy, plans, kind=kinds.chosen(policy, settings.step))
    return Session(job, pack, origin, belongs, [plan.done for plan in plans])


def _belongs(own: DPO, shard: Tokenized, held: str) -> dict[str, str]:
    found = checkpoints.identity(own, shard, held)
    # Cut into other blocks than a learner's alone (`packed.state`).
    return found | ({"optimizer": json.dumps("adamw8bit of a pack")} if own.optimizer == "adamw8bit" else {})


def _kept(file: Path, belongs: dict[str, str]) -> State | None:
    if not outputs.steps_of(file):
        return None
    tensors = checkpoints.read(file, belongs)
    series = {
        name.removeprefix("series."): values.tolist()
        for name, values in tensors.items()
        if name.startswith("series.")
    }
    return State(tensors, series)
