"""The workload `command`: any program in any language is an arm.

Its wall and CPU time and its memory are measured for nothing; anything else it reports itself, one JSON
object a line, in a file of its own in the directory `$CORESIDENT_EVENTS`:

    echo '{"event": "metric", "name": "speed", "value": 9.5, "unit": "1/s"}' >> "$CORESIDENT_EVENTS/$$.jsonl"

Exit code 0 means done. A factor reaches the program through its environment: `factors: {env.N: [4, 8]}` sets
N, so that no template language is needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from coresident.errors import MachineError, UserError
from coresident.workload import Launch, Metric, Needs, Parameters, Reporter, Workload


def _variable(name: str) -> str:
    if not name or "=" in name or "\0" in name:
        raise ValueError(f"{name!r} is not a variable's name")
    return name


def _without_null(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain a null character")
    return text


Text = Annotated[str, AfterValidator(_without_null)]
Words = Annotated[tuple[Text, ...], Field(strict=False)]


class Reported(Parameters):
    """A metric that the program reports: its unit, and whether more or less of it is better."""

    unit: str = ""
    better: Literal["more", "less"] | None = None


class Command(Parameters):
    """What to run, where, and with which variables: `argv` (words) or `shell` (a line for `sh -c`).

    `env` adds to the lab's environment; numbers are written as in JSON. `cpus` cores are reserved for it and
    it is pinned to them (0: unpinned). `inputs` are files whose content is hashed into the record; relative
    to `cwd`, like the program.
    """

    argv: Words | None = None
    shell: Text | None = None
    cwd: Text | None = None
    env: dict[Annotated[str, AfterValidator(_variable)], Text | int | float] = Field(default_factory=dict)
    cpus: Annotated[int, Field(ge=0)] = 0
    inputs: Words = ()
    metrics: dict[str, Reported] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_command(self) -> Self:
        if (self.argv is None) == (self.shell is None):
            raise ValueError("give exactly one of argv (a list) and shell (a line)")
        if self.argv is not None and not (self.argv and self.argv[0]):
            raise ValueError("argv: must name a program")
        if self.shell is not None and not self.shell.strip():
            raise ValueError("shell: must not be empty")
        return self


def command_line(parameters: Command) -> Sequence[str]:
    """The words to execute."""
    return ["sh", "-c", parameters.shell] if parameters.shell is not None else list(parameters.argv or ())


def variables(parameters: Command) -> dict[str, str]:
    """What `env` adds to the environment, as text."""
    return {name: str(value) for name, value in parameters.env.items()}


def directory(parameters: Command) -> Path:
    """Where the program runs: `cwd`, else where the lab does."""
    return Path(parameters.cwd) if parameters.cwd is not None else Path.cwd()


def declared(parameters: Command) -> dict[str, Metric]:
    """The metrics that `metrics` declares, by name."""
    return {
        name: Metric(name, told.unit, told.better, "reported by the command")
        for name, told in parameters.metrics.items()
    }


def launch(parameters: Command) -> Launch:
    """What the lab starts."""
    return Launch(tuple(command_line(parameters)), variables(parameters), directory(parameters))


def inspect(parameters: Command) -> Needs:
    """Check that the directory, the program and the inputs exist. Raises `UserError`."""
    place = directory(parameters)
    if not place.is_dir():
        raise UserError(f"cwd: {str(place)!r} is not a directory", "create it, or correct `cwd`")
    program = command_line(parameters)[0]
    named = "/" in program
    path = variables(parameters).get("PATH", os.environ.get("PATH", os.defpath))
    # `which` looks for a name without a slash in PATH, and `.` joined to `./script` has none left.
    if shutil.which(str((place / program).absolute()) if named else program, path=path) is None:
        if not named:
            raise UserError(f"argv: {program!r} is in no directory of PATH", "install it, or give its path")
        there = (place / program).is_file()
        raise UserError(
            f"argv: {str(place / program)!r} {'is not executable' if there else 'does not exist'}",
            f"run `chmod +x {program}`, or name its interpreter first"
            if there
            else "correct its path (relative to `cwd`)",
        )
    inputs = tuple(place / name for name in parameters.inputs)
    for input_file in inputs:
        if not input_file.is_file():
            raise UserError(
                f"inputs: {str(input_file)!r} is not a file", "correct its path (relative to `cwd`)"
            )
    return Needs(workers=1, cpus_per_worker=parameters.cpus, inputs=inputs)


def run(parameters: Command, cell: Reporter) -> None:
    """Run the program here, without a lab. Raises `MachineError` unless it exits with 0."""
    del cell
    environment = {**os.environ, **variables(parameters)}
    try:
        status = subprocess.run(
            command_line(parameters), cwd=directory(parameters), env=environment, check=False
        ).returncode
    except OSError as error:
        raise MachineError(
            f"{command_line(parameters)[0]!r} cannot be executed: {error.strerror}", "correct `argv`"
        ) from None
    if status != 0:
        how = f"exit code {status}" if status > 0 else f"signal {-status}"
        raise MachineError(f"the command ended with {how}", "its own output says why")


workload = Workload(
    name="command",
    about="any program; wall, CPU and memory are measured, the rest it reports itself",
    parameters=Command,
    metrics=(),
    controls=frozenset(),
    run=run,
    inspect=inspect,
    open=True,
    launch=launch,
    reports=declared,
)
