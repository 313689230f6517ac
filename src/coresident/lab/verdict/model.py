"""What a verdict says: a state for each hypothesis, what it rests on, and the exit status that follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from coresident.lab.study.schema import Level


class State(StrEnum):
    """What the evidence says about a claim."""

    SUPPORTED = "supported"
    REFUTED = "refuted"
    UNDECIDED = "undecided"
    PENDING = "pending"
    INVALID = "invalid"


# A claim about several levels stands or falls as one: a counterexample refutes it whatever the other levels
# say, a failed control leaves it untested, and it is supported only where every level supports it.
HYPOTHESIS_PRECEDENCE = (State.REFUTED, State.INVALID, State.UNDECIDED, State.PENDING, State.SUPPORTED)
# A study is no single claim: a failed control says that its measurements are in doubt, so that comes first.
STUDY_PRECEDENCE = (State.INVALID, State.REFUTED, State.UNDECIDED, State.PENDING, State.SUPPORTED)

_EXIT = {State.SUPPORTED: 0, State.REFUTED: 1, State.UNDECIDED: 3, State.PENDING: 3, State.INVALID: 4}


@dataclass(frozen=True)
class SetAside:
    """Outcomes that were not pooled with those that count, because their conditions are older.

    `differing` lists every condition that changed, as (key, value then, value now); "" stands for absent.
    """

    conditions: str
    newest: str
    records: tuple[str, ...]
    differing: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Finding:
    """One comparison at one point of the factors.

    `estimate`, `low` and `high` are in `unit` ("" for a ratio, a rate or a sameness), None where there are
    none; `limits` is the closed range in which the claim is true (infinite on an open side; None for `same`);
    `pairs` is the number of blocks that count, `needed` the fewest that can decide. `conditions` is the hash
    that all of them share.
    """

    at: Mapping[str, Level]
    state: State
    why: str
    pairs: int
    needed: int
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    limits: tuple[float, float] | None = None
    unit: str = ""
    conditions: str | None = None
    set_aside: tuple[SetAside, ...] = ()


@dataclass(frozen=True)
class Withdrawn:
    """A record that was retracted after it was seen."""

    record: str
    reason: str
    date: str


@dataclass(frozen=True)
class Unpassed:
    """A control that was `state` (failed or unverified) in `count` of the `of` records that answer it.

    `reason` is an example of the most frequent one.
    """

    control: str
    state: str
    count: int
    of: int
    reason: str


@dataclass(frozen=True)
class Blocks:
    """How many blocks ended with an outcome in every cell, how many there must be, and may be at most."""

    measured: int
    needed: int
    most: int


@dataclass(frozen=True)
class Judged:
    """One hypothesis: `about` says what is compared, `post_hoc` that it was stated or changed after data,
    `after_retraction` that records of its cells were retracted.
    """

    name: str
    claim: str
    about: str
    state: State
    post_hoc: bool
    findings: tuple[Finding, ...]
    why: str
    after_retraction: bool = False


@dataclass(frozen=True)
class Verdict:
    """A study's verdict.

    `state` is None for a study without hypotheses. `measured` of `planned` counts (cell, repetition) that
    must be there and are `ok`. `conditions` are the hashes that findings rest on (more than one: levels were
    measured under different conditions, each within its own); `set_aside` is what was not pooled. `statuses`
    counts the records that no retraction names; `stopped` says why a run ended before all was measured, and
    `wide` names the comparisons for whose width it was to go on.
    """

    study: str
    question: str
    state: State | None
    hypotheses: tuple[Judged, ...]
    measured: int
    planned: int
    conditions: tuple[str, ...]
    set_aside: tuple[SetAside, ...]
    blocks: Blocks
    statuses: Mapping[str, int]
    retracted: tuple[Withdrawn, ...] = ()
    controls: tuple[Unpassed, ...] = ()
    stopped: str = ""
    wide: tuple[str, ...] = ()

    @property
    def unfinished(self) -> bool:
        """Whether further blocks are asked for."""
        return self.blocks.measured < self.blocks.needed or bool(
            self.wide and self.blocks.measured < self.blocks.most
        )


def first_of(states: Iterable[State], precedence: tuple[State, ...]) -> State:
    """The state that comes first in `precedence`; pending where there is none (nothing supports nothing)."""
    present = set(states)
    return next((state for state in precedence if state in present), State.PENDING)


def exit_status(verdict: Verdict) -> int:
    """The status to exit with: 4 any invalid, else 1 any refuted, else 3 any undecided or pending, else 0.

    Without hypotheses: 0 if every planned cell is ok, else 3. A run that is not at its end has settled
    nothing: 3, unless it is invalid.
    """
    if (verdict.stopped or verdict.unfinished) and verdict.state is not State.INVALID:
        return 3
    if verdict.state is None:
        return 0 if verdict.measured >= verdict.planned else 3
    return _EXIT[verdict.state]
