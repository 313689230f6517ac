"""The workload `command`: what it may be told, what is checked before anything runs, what it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from coresident.errors import MachineError, UserError
from coresident.lab.run import command
from coresident.lab.run.command import Command
from coresident.lab.run.process.supervise import Outcome, supervise
from coresident.lab.run.reported.events import read
from coresident.lab.run.status import conclude
from coresident.workload import EVENTS, Reporter, workload


def test_it_is_found_by_name_and_accepts_any_metric() -> None:
    found = workload("command")
    assert found is command.workload
    assert found.open and found.launch is not None


def test_a_list_is_executed_as_it_is_and_a_line_by_the_shell() -> None:
    assert command.command_line(Command(argv=("echo", "a b"))) == ["echo", "a b"]
    assert command.command_line(Command(shell="echo $N | cat")) == ["sh", "-c", "echo $N | cat"]


def test_a_study_file_gives_lists_and_numbers() -> None:
    given = Command.model_validate_json(
        '{"argv": ["a"], "env": {"N": 4, "LR": 0.001, "S": "x"}, "inputs": ["f"]}'
    )
    assert (given.argv, given.inputs) == (("a",), ("f",))
    assert command.variables(given) == {"N": "4", "LR": "0.001", "S": "x"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "exactly one of argv"),
        ({"argv": ["a"], "shell": "a"}, "exactly one of argv"),
        ({"argv": []}, "must name a program"),
        ({"argv": [""]}, "must name a program"),
        ({"shell": "  "}, "must not be empty"),
        ({"argv": "echo hello"}, "valid tuple"),
        ({"argv": ["echo", 4]}, "valid string"),
        ({"argv": ["a\0b"]}, "null character"),
        ({"shell": "a", "env": {"A=B": "1"}}, "not a variable's name"),
        ({"shell": "a", "env": {"A": True}}, "valid"),
        ({"shell": "a", "env": {"A": None}}, "valid"),
        ({"shell": "a", "cpus": -1}, "greater than or equal to 0"),
        ({"shell": "a", "cpu": 1}, "Extra inputs"),
        ({"shell": "a", "metrics": {"speed": {"unit": "1/s", "better": "most"}}}, "'more' or 'less'"),
    ],
)
def test_what_makes_no_command_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Command.model_validate(given)


def test_needs_are_the_cores_and_the_inputs(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    needs = command.inspect(Command(argv=("./run.sh",), cwd=str(tmp_path), cpus=2, inputs=("data",)))
    assert (needs.workers, needs.cpus_per_worker, needs.inputs) == (1, 2, (tmp_path / "data",))


def test_declared_metrics_have_a_unit_and_a_direction() -> None:
    given = Command.model_validate({"shell": "a", "metrics": {"speed": {"unit": "1/s", "better": "more"}}})
    found = command.declared(given)["speed"]
    assert (found.name, found.unit, found.better) == ("speed", "1/s", "more")


def test_what_does_not_exist_is_the_users_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("text")
    place = str(tmp_path)
    for given, problem, remedy in [
        (Command(argv=("no-such-program",)), "'no-such-program' is in no directory of PATH", "install it"),
        (Command(argv=("./nothing",), cwd=place), "nothing' does not exist", "correct its path"),
        (Command(argv=("./plain",), cwd=place), "plain' is not executable", "chmod"),
        (Command(argv=("sh",), cwd=f"{place}/nowhere"), "nowhere' is not a directory", "create it"),
        (
            Command(argv=("sh",), cwd=place, inputs=("plain", "missing")),
            "missing' is not a file",
            "correct its path",
        ),
        (Command(argv=("sh",), env={"PATH": "/nowhere"}), "'sh' is in no directory of PATH", "install it"),
    ]:
        with pytest.raises(UserError) as error:
            command.inspect(given)
        assert problem in error.value.problem and remedy in error.value.remedy


def test_without_a_lab_it_runs_in_place(tmp_path: Path) -> None:
    reporter = Reporter(events=tmp_path / "events", work=tmp_path)
    command.run(Command(shell='echo "$N" > out', cwd=str(tmp_path), env={"N": 8}), reporter)
    assert (tmp_path / "out").read_text() == "8\n"
    with pytest.raises(MachineError, match="exit code 3"):
        command.run(Command(shell="exit 3"), reporter)
    with pytest.raises(MachineError, match="signal 15"):
        command.run(Command(shell="kill $$"), reporter)
    with pytest.raises(MachineError, match="cannot be executed"):
        command.run(Command(argv=("no-such-program",)), reporter)


def measured(tmp_path: Path, given: Command, **more: Any) -> tuple[str, str, float | None]:
    """Supervise, read and conclude, as the lab does for a hypothesis about `speed`."""
    events = tmp_path / "events"
    events.mkdir()
    outcome: Outcome = supervise(
        command.command_line(given),
        env={**os.environ, EVENTS: str(events), **command.variables(given)},
        cwd=command.directory(given),
        stdout=tmp_path / "out",
        stderr=tmp_path / "err",
        timeout=10,
        grace=1,
    )
    observed = read(events, outcome.started)
    metric = observed.metrics.get("speed")
    return (*conclude(outcome, observed, {"speed"}, by_exit=True), metric.value if metric else None)


SPEED = 'echo "{\\"event\\": \\"metric\\", \\"name\\": \\"speed\\", \\"value\\": $V, \\"unit\\": \\"1/s\\"}" '
SPEED += '>> "$CORESIDENT_EVENTS/$$.jsonl"'


@pytest.mark.parametrize(
    ("shell", "value", "expected"),
    [
        (SPEED, 9.5, ("ok", 9.5)),
        (SPEED, "9,5", ("failed", None)),
        (SPEED, "NaN", ("nonfinite", None)),
        (SPEED, "1e400", ("nonfinite", None)),
        (SPEED, '\\"9.5\\"', ("failed", None)),
        (SPEED.replace("$V", '\\"$V\\"'), "9.5", ("failed", None)),
        (SPEED + "; exit 1", 9.5, ("failed", 9.5)),
        ("true", 9.5, ("failed", None)),
    ],
)
def test_a_shell_script_reports_a_metric_and_bad_ones_are_never_data(
    tmp_path: Path, shell: str, value: str | float, expected: tuple[str, float | None]
) -> None:
    status, reason, metric = measured(tmp_path, Command(shell=shell, env={"V": value}))
    assert (status, metric) == expected
    assert (reason == "") == (status == "ok")


def test_a_program_beside_the_study_is_found_where_the_directory_is_a_dot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    for place in (".", "./", None):
        assert command.inspect(Command(argv=("./run.sh",), cwd=place)).workers == 1
