"""A pack: N learners trained together, each as it would be alone.

Every step takes one batch of each learner whose training is not over. A learner's rows leave with its last step. A
learner whose loss, gradient or reward is not finite stops there, alone and by name, with the last adapter that was
good; its rows stay, masked, until its steps would have been over, so that what the others compute has the same shape, and
with it the same bits, as if it had been masked from the start.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from coresident.engines.pool.learning.learner import AHEAD, FIGURES, StepResult
from coresident.engines.pool.learning.tokenized import Batch
from coresident.engines.pool.packed.arena import Arena, check_beyond
from coresident.engines.pool.packed.extent import Extent
from coresident.engines.pool.packed.kinds import EAGER, Kind
from coresident.engines.pool.packed.optimiser import rates
from coresident.engines.pool.packed.policy import Policy
from coresident.engines.pool.packed.rows import Rows, pack
from coresident.engines.pool.packed.state import State
from coresident.engines.pool.packed.step import Step
from coresident.engines.pool.parameters import DPO
from coresident.errors import InternalError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """One learner: its settings (`DPO.of`), its `steps` in all, the adapter it starts from under PEFT's file names, and, of
    one that goes on, what it was (`kept`); `batches` are those of the steps that are left.
    """

    settings: DPO
    steps: int
    batches: Iterable[Batch]
    start: Mapping[str, Tensor]
    kept: State | None = None

    @property
    def done(self) -> int:
        """Steps that were done before this pack."""
        return 0 if self.kept is None else self.kept.steps

    @property
    def left(self) -> int:
        """Steps that are to do."""
        return max(0, self.steps - self.done)


class _Told:
    """A step that the device was told to do, and its table on the way to us."""

    def __init__(self, table: Tensor, number: int, members: Sequence[int], tokens: Sequence[int]) -> None:
        self.number, self.members, self.tokens = number, tuple(members), tuple(tokens)
        self._table, self._there = table, None
        if table.is_cuda:
            # Now, behind this step: later it would wait for the next one too.
            self._table = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            self._table.copy_(table, non_blocking=True)
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._there.record()

    def wait(self) -> list[list[float]]:
        """The step's table (`Step.__call__`)."""
        if self._there is not None:
            self._there.synchronize()
        found: list[list[float]] = self._table.tolist()
        return found


class Pack:
    """The learners of these plans over one policy. `masked` ones are computed and never learn: what the others of a pack
    are compared with.

    `series` are each learner's, as `learning.learner.Learner` has them; `failed` says of a learner that stopped why.
    """

    def __init__(
        self,
        policy: Policy,
        plans: Sequence[Plan],
        masked: AbstractSet[int] = frozenset(),
        kind: Kind = EAGER,
    ) -> None:
        self.policy = policy
        self._plans, self._kind = list(plans), kind
        common = plans[0].settings
        self._common = common
        self.step_number = self._real = self._rows = 0
        self.series: list[dict[str, list[float]]] = [
            {name: [] for name in ("loss", *FIGURES[common.loss], "gradient_norm", "tokens")} for _ in plans
        ]
        self.failed: dict[int, str] = {}
        self.finished: dict[int, dict[str, Tensor]] = {}
        device = policy.device
        self._device = device
        exact = torch.float64 if common.dtype == "float64" else torch.float32
        products = torch.bfloat16 if common.adapter_products == "bfloat16" else exact
        self.arena = Arena(
            policy.layers,
            [plan.settings.rank for plan in plans],
            exact,
            products,
            device,
            common.optimizer == "adamw8bit",
        )
        for number, plan in enumerate(plans):
            self.arena.put(number, plan.start)
            if plan.kept is not None:
                plan.kept.put(self.arena, number)
                for name, values in plan.kept.series.items():
                    self.series[number][name].extend(values)
                # What it was lies in the arena now; here it would be there once more, until the end.
                self._plans[number] = replace(plan, kept=State({}, plan.kept.series))
        self.arena.refresh()
        self.members = list(range(len(plans)))
        alive = torch.tensor([number not in masked for number in self.members], device=device)
        self._masked = set(masked)
        self._step = self._stepped(alive)
        self._work = self._worked_out()
        self._told: _Told | None = None
        self._heard_at = time.monotonic()

    @property
    def kind(self) -> str:
        """Which kind of step is taken."""
        return self._kind.name

    @property
    def fill(self) -> float:
        """Real tokens as a share of the rows that were computed."""
        return self._real / self._rows if self._rows else 1.0

    def planned(self, number: int) -> int:
        """How many steps a learner has."""
        return self._plans[number].steps

    def reached(self, number: int) -> int:
        """How many steps of a learner the device was told to do, by this pack and before."""
        plan = self._plans[number]
        return plan.done + min(self.step_number, plan.left)

    def state(self, number: int) -> State:
        """What a member is now. Only after `settle`, or it is not yet what `series` says."""
        return State.of(self.arena, self.members.index(number), self.series[number])

    @property
    def over(self) -> bool:
        """Whether every learner's steps are done, or none is left that learns."""
        left = set(range(len(self._plans))) - self._masked - self.failed.keys()
        return all(self._plans[one].left <= self.step_number for one in left)

    def step(self) -> list[tuple[int, StepResult]]:
        """One step of every learner that has one left. Returns what is known by now of learners that still learn, by
        number: on a CPU this step's results, on a card those of the step before, so that the card need not wait for us.
        """
        number = self.step_number + 1
        leaving = [one for one in self.members if self._plans[one].left < number]
        known = self._heard() if leaving else []
        self._part_with(leaving)
        rows, reference = next(self._work, (None, None))
        if rows is None:
            raise InternalError(f"step {number} was asked of a pack that ended after {number - 1}")
        settings = [self._plans[one].settings for one in self.members]
        counts = [self._plans[one].done + number for one in self.members]
        rate = rates(settings, counts, self.arena.masters.dtype).to(self._device)
        told = _Told(self._step(rows, reference, rate), number, self.members, rows.tokens)
        self.step_number = number
        self._real += sum(rows.tokens)
        self._rows += len(rows.ids)
        if self._device.type != "cuda":
            self._told = told
            return known + self._heard()
        known += self._heard()
        self._told = told
        return known

    def settle(self) -> list[tuple[int, StepResult]]:
        """Wait until the device has done everything that it was told, and return what was not known before."""
        known = self._heard()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return known

    def close(self) -> None:
        """After the last step: every learner's adapter is in `finished`. Raises InternalError where padding was learned."""
        self._heard()
        self._part_with(list(self.members))

    def _heard(self) -> list[tuple[int, StepResult]]:
        """What the step that was told last made of its learners, once it is through."""
        told, self._told = self._told, None
        if told is None:
            return []
        table = told.wait()
        now = time.monotonic()
        seconds, self._heard_at = now - self._heard_at, now
        results = []
        for place, one in enumerate(told.members):
            if one in self.failed or one in self._masked:
                continue
            values = dict(zip(self._step.names, (row[place] for row in table), strict=False))
            step = self._plans[one].done + told.number
            if not table[-1][place]:
                self.failed[one] = _reason(values, step)
                continue
            result = StepResult(step=step, tokens=told.tokens[place], seconds=seconds, **values)
            results.append((one, result))
            for name, series in self.series[one].items():
                series.append(getattr(result, name))
        return results

    def _stepped(self, alive: Tensor) -> Step:
        return self._kind.make(
            self.policy, self.arena, [self._plans[one].settings for one in self.members], alive
        )

    def _part_with(self, leaving: Sequence[int]) -> None:
        """Take learners and their rows out, keeping what they learned."""
        if not leaving:
            return
        check_beyond(self.arena)
        for one in leaving:
            place = self.members.index(one)
            self.finished[one] = {
                name: value.cpu().contiguous().clone() for name, value in sorted(self.arena.parts(place))
            }
        staying = [place for place, one in enumerate(self.members) if one not in leaving]
        self.members = [self.members[place] for place in staying]
        if self.members:
            alive = self._step.alive[torch.tensor(staying, device=self._device)]
            self.arena.keep(staying)
            self._step = self._stepped(alive)

    def _worked_out(self) -> Iterator[tuple[Rows, Tensor | None]]:
        """Rows on the device, each with its reference log-probabilities where those are worked out before the first step."""
        common = self._common
        early = common.reference == "precomputed" or common.held_to == "start"
        beforehand = common.loss == "dpo" and early
        size = sum(2 * one.settings.batch * one.settings.max_length * one.left * 8 for one in self._plans)
        if not beforehand and size > AHEAD:
            return ((self._step.shaped(rows, None).to(self._device), None) for rows in self._packed())
        steps = list(self._packed())
        most: dict[int, Extent] = {}
        for rows in steps:
            count, own = len(rows.groups.spans), rows.extent
            most[count] = own.over(most.get(count, own))
        moved = [self._step.shaped(rows, most[len(rows.groups.spans)]).to(self._device) for rows in steps]
        if not beforehand:
            return ((rows, None) for rows in moved)
        if common.held_to != "start":
            return iter([(rows, self._step.reference(rows)) for rows in moved])
        return iter(list(self._held_to_start(moved)))

    def _held_to_start(self, steps: Sequence[Rows]) -> Iterator[tuple[Rows, Tensor]]:
        """Each step's rows with what the adapters say of them that its learners start from."""
        members, step = list(range(len(self._plans))), self._step
        # The pack's own adapters are those that its learners start from, unless one goes on.
        started = all(plan.kept is None for plan in self._plans)
        for number, rows in enumerate(steps):
            staying = [one for one in members if self._plans[one].left > number]
            if not started or len(staying) < len(members):
                members, started = staying, True
                settings = [self._plans[one].settings for one in members]
                start = Arena(
                    self.policy.layers, [own.rank for own in settings], self.arena.masters.dtype,
                    self.arena.work.dtype, self._device,
                )  # fmt: skip
                for place, one in enumerate(members):
                    start.put(place, self._plans[one].start)
                start.refresh()
                step = Step(self.policy, start, settings, step.alive[:0])
            yield rows, step.reference(rows, adapters=True)

    def _packed(self) -> Iterator[Rows]:
        streams = [iter(plan.batches) for plan in self._plans]
        for number in range(max(plan.left for plan in self._plans)):
            batches = [
                next(stream) for stream, plan in zip(streams, self._plans, strict=True) if plan.left > number
            ]
            yield pack(batches)


def _reason(values: Mapping[str, float], step: int) -> str:
    for name, value in values.items():
        if not torch.isfinite(torch.tensor(value)):
            return f"the {name.replace('_', ' ')} is {value} at step {step}"
    raise InternalError(f"a learner of a pack stopped at step {step} with finite figures")
