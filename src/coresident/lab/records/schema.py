"""What a record says: what was asked, what ran, what was seen, under which conditions. Never edited."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

# Version 2 has a checksum in the file; 1 had none, and is read as it is.
VERSION: Final = 2
READ: Final = (1, 2)

Status = Literal["ok", "failed", "timeout", "oom", "nonfinite", "interrupted", "invalid"]
# These end a repetition: they are what the cell does, not what went wrong in measuring it.
OUTCOMES: frozenset[str] = frozenset({"ok", "oom", "nonfinite", "timeout"})


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class StudyRef(_Strict):
    """The study a record belongs to."""

    name: str
    fingerprint: str


class CellRef(_Strict):
    """The cell: what was asked."""

    id: str
    workload: str
    arm: str
    factors: dict[str, bool | int | float | str]
    parameters: dict[str, Any]
    hash: str


class Conditions(_Strict):
    """All that could change the numbers unasked, flat, and the hash of it."""

    hash: str
    values: dict[str, str]


class Block(_Strict):
    """Which block the record belongs to.

    `members` are the ids of all cells this generation measures; `position` is this cell's place among them.
    """

    repetition: Annotated[int, Field(ge=0)]
    generation: Annotated[int, Field(ge=0)]
    members: list[str]
    position: Annotated[int, Field(ge=0)]


class MetricValue(_Strict):
    """A metric's value with its unit; `samples` are the raw observations behind it, where there were any."""

    value: float
    unit: str
    scope: Literal["session", "cumulative"] = "session"
    samples: list[float] = Field(default_factory=list)


class Series(_Strict):
    """A sequence reported whole. `digest` is over all values; `values` are kept up to a limit."""

    digest: str
    length: int
    values: list[float | None] = Field(default_factory=list)


class Control(_Strict):
    """What was asked, what took effect, and what follows."""

    asked: Any
    ran: Any
    state: Literal["passed", "failed", "unverified"]
    reason: str = ""


class Worker(_Strict):
    """A worker's window (monotonic seconds) and its work."""

    id: str
    start: float
    end: float
    work: float
    unit: str


class Phase(_Strict):
    """A named stretch of the cell (seconds since the cell's start)."""

    name: str
    start: float
    end: float | None = None


class Record(_Strict):
    """One attempt at one cell, as it went."""

    schema_version: Literal[1, 2] = VERSION
    study: StudyRef
    cell: CellRef
    conditions: Conditions
    block: Block
    attempt: Annotated[int, Field(ge=1)]
    continues: list[str] = Field(default_factory=list)
    status: Status
    reason: str = ""
    started: str
    duration: float
    clock_step: float = 0.0
    metrics: dict[str, MetricValue] = Field(default_factory=dict)
    series: dict[str, Series] = Field(default_factory=dict)
    digests: dict[str, str] = Field(default_factory=dict)
    controls: dict[str, Control] = Field(default_factory=dict)
    workers: list[Worker] = Field(default_factory=list)
    phases: list[Phase] = Field(default_factory=list)
    telemetry: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)
    argv: list[str] = Field(default_factory=list)
    artifacts: dict[str, str] = Field(default_factory=dict)

    @property
    def id(self) -> str:
        """The record's name and, with `.json`, its file: unique in a run directory."""
        return f"{self.cell.id}-r{self.block.repetition}-a{self.attempt}"


class Retraction(_Strict):
    """Takes a record out of every aggregate while leaving it visible."""

    schema_version: Literal[1, 2] = VERSION
    record: str
    reason: str
    date: str
