"""The command line where all is well: what each command prints, where, and which status it exits with."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import coresident as package

COMMANDS = [
    "run",
    "try",
    "init",
    "studies",
    "show",
    "import",
    "logs",
    "records",
    "retract",
    "status",
    "verdict",
    "doctor",
    "pool",
    "pretrain",
    "moe",
]
HEAVY = {
    "torch",
    "numpy",
    "pandas",
    "duckdb",
    "scipy",
    "transformers",
    "peft",
    "pydantic",
    "ruamel",
    "rich",
    "psutil",
}
Listing = Callable[[Path], Mapping[str, str]]
Command = Callable[..., Any]
Change = Callable[..., None]


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A real `coresident` process."""
    argv = [sys.executable, "-m", "coresident", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, **options)


def test_help_names_every_command(coresident: Command) -> None:
    told = coresident("--help")
    assert told.status == 0
    listed = told.out.partition("Commands:")[2].split("\n")
    assert [line.split()[0] for line in listed if line.strip()] == COMMANDS
    for command in COMMANDS:
        assert coresident(command, "--help").status == 0


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from coresident.cli.app import main; sys.argv = ['coresident', '--help']\n"
        "try: main()\n"
        "finally: print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "coresident" in done.stderr.split()
    assert HEAVY.isdisjoint(done.stderr.split())


@pytest.mark.parametrize("study", ["small.yaml", "lab-aa"])
def test_a_dry_run_says_what_would_run_and_writes_nothing(
    study: str, coresident: Command, changed: Change, place: Path, listing: Listing
) -> None:
    changed()
    before = listing(place.parent)
    told = coresident("run", study, "--dry-run")
    assert (told.status, told.err) == (0, "")
    assert "2 cells x" in told.out
    assert "exclusive-device" in told.out
    planned = coresident("run", study, "--dry-run", "--json")
    assert (planned.status, planned.err) == (0, "")
    plan = json.loads(planned.out)
    assert [cell["cell"] for cell in plan["cells"]] == [
        line.split()[1].rstrip(":") for line in told.out.splitlines() if line.startswith("cell ")
    ]
    assert plan["out"] == f"runs/{plan['study']}"
    assert listing(place.parent) == before


def test_a_run_measures_prints_the_verdict_and_says_where_the_records_are(
    coresident: Command, changed: Change, place: Path
) -> None:
    changed()
    told = coresident("run", "small.yaml")
    assert (told.status, told.err) == (0, "")
    assert "\x1b" not in told.out, "plain lines where there is no terminal"
    lines = told.out.splitlines()
    assert lines[:2] == ["small: Is two more than one?", "2 cells, 3 blocks, records in runs/small/records"]
    measured = sorted(line.split(":")[0] for line in lines if ": ok" in line)
    assert measured == [f"block {block}  {arm}" for block in (1, 2, 3) for arm in ("one", "two")]
    assert "speed (1/s)" in told.out, "medians of what is claimed"
    assert "wall_seconds" not in told.out
    assert any(re.fullmatch(r"\d more metrics: coresident verdict runs/small --all", line) for line in lines)
    assert "[1.9960, 2.0040]" in told.out
    assert lines[-1] == "records: runs/small/records"
    assert len(list((place / "runs/small/records").iterdir())) == 6


def test_json_is_all_of_standard_output_and_progress_goes_to_standard_error(
    coresident: Command, changed: Change, place: Path
) -> None:
    changed()
    told = coresident("run", "small.yaml", "--json", "--out", "there")
    verdict = json.loads(told.out)
    assert (told.status, verdict["state"], verdict["exit_status"]) == (0, "supported", 0)
    assert told.err.count(": ok") == 6
    assert "\x1b" not in told.err
    assert (place / "there/plan.json").is_file()
    assert not (place / "runs").exists()


def test_a_repeated_run_measures_only_what_is_missing(
    coresident: Command, changed: Change, place: Path
) -> None:
    changed()
    assert coresident("run", "small.yaml").status == 0
    again = coresident("run", "small.yaml")
    assert again.status == 0
    assert ": ok" not in again.out
    more = coresident("run", "small.yaml", "--set", "repetitions.min=4")
    assert more.out.count(": ok") == 2


def test_a_terminal_sees_what_runs_now(changed: Change, place: Path) -> None:
    changed(("echo said;", "sleep 0.3;"), ("min: 3", "min: 1"))
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": ""}
    running = subprocess.Popen(
        [sys.executable, "-m", "coresident", "run", "small.yaml"],
        cwd=place, env=environment, stdin=slave, stdout=slave, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    seen = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:
            break
        if not part:
            break
        seen += part
    os.close(master)
    assert running.wait() == 3, "one block decides nothing"
    assert b"\x1b[" in seen
    assert seen.count(b": ok") == 2


@pytest.mark.parametrize(
    ("replaced", "status", "state"),
    [
        ((), 0, "supported"),
        ((("at_least: 1.5", "at_least: 2.5"),), 1, "refuted"),
        ((("at_least: 1.5", "at_least: 2.0"),), 3, "undecided"),
        ((("min: 3", "min: 1"),), 3, "undecided"),
        (
            (
                ("echo said;", 'echo \'{"event": "control", "name": "warm", "asked": 1, "ran": 2, "passed": false}\' '
                               "> $CORESIDENT_EVENTS/b.jsonl;"),
                ("[exclusive-device]", "[warm]"),
            ),
            4,
            "invalid",
        ),
    ],
    ids=["supported", "refuted", "undecided", "too few", "invalid"],
)  # fmt: skip
def test_the_verdict_is_the_exit_status_of_run_and_of_verdict(
    replaced: tuple[tuple[str, str], ...],
    status: int,
    state: str,
    coresident: Command,
    changed: Change,
    place: Path,
) -> None:
    changed(*replaced)
    assert coresident("run", "small.yaml").status == status
    told = coresident("verdict", "runs/small", "--json")
    assert (told.status, told.err) == (status, "")
    assert json.loads(told.out)["hypotheses"]["faster"]["state"] == state
    shown = coresident("verdict", "runs/small", "--markdown")
    assert shown.status == status
    assert f"| {state} |" in shown.out
    assert "speed" in shown.out


@pytest.mark.parametrize("form", [(), ("--markdown",)])
def test_a_verdict_shows_what_is_claimed_and_with_all_everything(
    form: tuple[str, ...], coresident: Command, small: Path
) -> None:
    brief, whole = (coresident("verdict", str(small), *form, *more) for more in ((), ("--all",)))
    assert brief.status == whole.status == 0
    assert "speed (1/s)" in brief.out and "wall_seconds" not in brief.out
    assert "more metrics: coresident verdict runs/small --all" in brief.out
    assert "speed (1/s)" in whole.out and "wall_seconds (s)" in whole.out
    assert "--all" not in whole.out
    plain, all_ = (coresident("verdict", str(small), "--json", *more) for more in ((), ("--all",)))
    assert plain == all_


def test_a_run_without_records_is_pending(coresident: Command, small: Path) -> None:
    for record in (small / "records").iterdir():
        record.unlink()
    told = coresident("verdict", str(small), "--json")
    assert (told.status, json.loads(told.out)["state"]) == (3, "pending")
    assert json.loads(coresident("records", str(small), "--json").out) == []
    for command in ("records", "status", "show"):
        assert coresident(command, str(small)).out == "no records in runs/small\n"


def test_try_compares_two_commands_and_its_status_says_whether_b_takes_less(
    coresident: Command, place: Path
) -> None:
    brief = ("try", "--repetitions", "3", "--half-width", "0.9", "--")
    told = coresident(*brief, "true", "sleep 0.05")
    assert told.status == 1
    assert "b-below-a" in told.out
    assert told.out.splitlines()[-1].startswith("B takes ") and "times the wall_seconds of A (" in told.out
    assert coresident(*brief, "sleep 0.05", "true").status == 0
    assert len(list((place / "runs").glob("try-*/plan.json"))) == 2, "each has a directory of its own"
    same = coresident(
        "try",
        "--repetitions",
        "1",
        "--half-width",
        "0.9",
        "--json",
        "--out",
        "mine",
        "--",
        "sleep 0.01",
        "sleep 0.01",
    )
    assert same.status in (0, 1, 3)
    assert json.loads(same.out)["study"] == "try"
    assert (place / "mine/records").is_dir()


def test_what_try_says_to_repeat_can_be_repeated(coresident: Command, place: Path) -> None:
    commands = ("--repetitions", "3", "--half-width", "0.9", "--", "sleep 0.01", "./comes-later")
    told = coresident("try", *commands)
    (run,) = (place / "runs").glob("try-*")
    assert told.status == 3
    assert f"repeat the command with --retry (and --out {run.relative_to(place)})" in told.err
    (place / "comes-later").write_text("#!/bin/sh\nsleep 0.05\n")
    (place / "comes-later").chmod(0o755)
    assert coresident("try", "--retry", "--out", str(run), *commands).status == 1


def test_a_dry_run_names_one_number_of_blocks_where_there_is_one(coresident: Command) -> None:
    told = coresident("run", "command-example", "--dry-run", "--set", "repetitions={min: 3}")
    assert " x 3 blocks, " in told.out


def test_init_writes_a_study_that_can_be_run(coresident: Command, place: Path) -> None:
    told = coresident("init", "mine")
    assert told.status == 0
    assert "coresident run mine.yaml --dry-run" in told.out
    assert (place / "mine.yaml").read_text().startswith("#")
    planned = coresident("run", "mine.yaml", "--dry-run", "--json")
    assert (planned.status, json.loads(planned.out)["study"]) == (0, "mine")
    assert "0 MiB" not in coresident("run", "mine.yaml", "--dry-run").out
    assert coresident("init", "yours.yaml").status == 0
    assert (place / "yours.yaml").is_file() and not (place / "yours.yaml.yaml").exists()


def test_studies_lists_what_is_shipped_and_each_can_be_planned(coresident: Command) -> None:
    listed = coresident("studies")
    names = [one["study"] for one in json.loads(coresident("studies", "--json").out)]
    assert {"demo", "lab-aa", "command-example"} <= set(names)
    assert [line.split()[0] for line in listed.out.splitlines()] == names
    for name in names:
        told = coresident("run", name, "--dry-run", "--set", "device=any")
        # Some ask for more memory or cores than a small machine has, or for traces or a model that are yet to be made; everything
        # else about them is sound.
        lacking = (" is missing", " usable", "evidence/moe/traces", "models/moe-64")
        assert told.status == 0 or any(what in told.err for what in lacking), told.err


def test_a_study_of_a_card_says_so_and_does_not_run_on_a_cpu(coresident: Command, place: Path) -> None:
    listed = {one["study"]: one["device"] for one in json.loads(coresident("studies", "--json").out)}
    assert (listed["pool-steps"], listed["demo"]) == ("card", "any")
    (line,) = [one for one in coresident("studies").out.splitlines() if one.startswith("pool-steps ")]
    assert line.split()[1:3] == ["a", "card"]
    told = coresident("run", "pool-steps")
    assert told.status == 2
    assert re.search(r"pool-steps\.yaml: device \(line \d+\): pool-steps asks about a card", told.err)
    assert "(--devices 0)" in told.err
    assert not (place / "runs").exists()


def test_a_parameter_that_is_set_like_a_key_is_told_where_it_stands(coresident: Command) -> None:
    for given, meant in (("steps=3", "parameters.steps"), ("learners=[2]", "factors.learners")):
        told = coresident("run", "demo", "--dry-run", "--set", given)
        assert told.status == 2 and f"did you mean '{meant}'?" in told.err


def test_show_lists_the_cells_a_line_each_or_prints_the_records_of_one_in_full(
    coresident: Command, small: Path
) -> None:
    told = coresident("show", str(small))
    assert (told.status, told.err) == (0, "")
    title, header, one, two, rest = told.out.splitlines()
    assert title == "Cells, with medians over blocks"
    assert header.split() == ["cell", "records", "speed", "(1/s)"]
    assert (one.split()[1:], two.split()[1:]) == (["3", "ok", "1"], ["3", "ok", "2"])
    assert rest == f"a cell's records in full: coresident show {small} CELL"
    assert len(json.loads(coresident("show", str(small), "--json").out)) == 6
    assert coresident("show", str(small), "one").out.count("metric      speed = 1 1/s") == 3
    shown = json.loads(coresident("show", str(small), "two", "--json").out)
    assert {record["cell"]["arm"] for record in shown} == {"two"}
    assert all(record["schema_version"] == 2 and record["retracted"] is False for record in shown)


def test_logs_prints_what_the_newest_or_a_named_attempt_wrote(coresident: Command, small: Path) -> None:
    told = coresident("logs", str(small), "one")
    assert told.status == 0
    assert "said" in told.out.splitlines()
    assert "/r2/a1/" in told.out
    name = next((small / "records").glob("one-*-r0-a1.json")).stem
    assert "/r0/a1/" in coresident("logs", str(small), "one", "--attempt", name).out


def test_records_as_a_table_csv_json_and_dataframe_are_the_same_rows(
    coresident: Command, small: Path
) -> None:
    table = package.records(small)
    assert {"record", "arm", "status", "metric", "value", "unit", "cell_hash", "conditions_hash"} <= set(
        table.columns
    )
    assert table[table.metric == "speed"].value.tolist() == [1, 1, 1, 2, 2, 2]
    written = list(csv.DictReader(io.StringIO(coresident("records", str(small), "--csv").out)))
    assert [row["record"] for row in written] == table.record.tolist()
    assert [float(row["value"]) for row in written] == table.value.tolist()
    read = json.loads(coresident("records", str(small), "--json").out)
    assert [(row["record"], row["metric"]) for row in read] == list(
        zip(table.record, table.metric, strict=True)
    )
    assert len(coresident("records", str(small)).out.splitlines()) == 1 + len(table)


def test_status_counts_outcomes_by_cell(coresident: Command, small: Path) -> None:
    rows = json.loads(coresident("status", str(small), "--json").out)
    assert [(row["arm"], row["outcomes"], row["retracted"]) for row in rows] == [
        ("one", {"ok": 3}, 0),
        ("two", {"ok": 3}, 0),
    ]
    assert "3 ok" in coresident("status", str(small)).out


def test_a_retracted_record_stays_visible_and_leaves_the_verdict(coresident: Command, small: Path) -> None:
    name = next((small / "records").glob("one-*-r0-a1.json")).stem
    told = coresident("retract", str(small), name, "--why", "the fan was off")
    assert (told.status, told.out) == (0, f"{name} is retracted: the fan was off\n")
    rows = json.loads(coresident("status", str(small), "--json").out)
    assert [(row["retracted"], row["outcomes"]) for row in rows] == [(1, {"ok": 2}), (0, {"ok": 3})]
    assert "RETRACTED" in coresident("show", str(small), "one").out
    assert re.search("^one-.*  2 ok, 1 retracted +1$", coresident("show", str(small)).out, re.MULTILINE)
    (small / "study.yaml").rename(small / "study.txt")
    assert "speed (1/s)" in coresident("show", str(small)).out
    (small / "study.txt").rename(small / "study.yaml")
    table = package.records(small)
    assert table[table.retracted].record.unique().tolist() == [name]
    verdict = coresident("verdict", str(small), "--json")
    assert (verdict.status, json.loads(verdict.out)["hypotheses"]["faster"]["findings"][0]["pairs"]) == (3, 2)


def test_doctor_says_what_is_wrong_and_what_to_do(coresident: Command) -> None:
    told = coresident("doctor", "--json")
    found = json.loads(told.out)
    assert told.status == (2 if any(one["level"] == "bad" for one in found) else 0)
    assert all(one["remedy"] for one in found if one["level"] != "ok")
    plain = coresident("doctor").out
    assert any(one["what"] in plain for one in found)


def test_reading_needs_no_right_to_write(coresident: Command, small: Path, listing: Listing) -> None:
    before = listing(small)
    for command in ("show", "status", "records", "verdict"):
        assert coresident(command, str(small)).status == 0
    assert listing(small) == before


@pytest.mark.parametrize("where", [("--debug", "show", "nowhere"), ("show", "nowhere", "--debug")])
def test_debug_gives_a_traceback_wherever_it_stands_and_changes_no_status(
    where: tuple[str, ...], place: Path
) -> None:
    done = process(*where, cwd=place)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback (most recent call last)" in done.stderr
    assert "coresident: nowhere is no run directory" in done.stderr


def test_our_own_bug_is_status_70_and_asks_for_a_report(
    coresident: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("coresident.lab.study.library.shipped", broken)
    told = coresident("studies")
    assert (told.status, told.out) == (70, "")
    assert told.err.startswith(
        "coresident: ZeroDivisionError: division by zero\n  -> this is a bug in coresident"
    )
    assert "Traceback" not in told.err
    assert "Traceback" in coresident("studies", "--debug").err


@pytest.mark.parametrize(
    "command",
    [
        ("show",),
        ("records", "--csv"),
        ("records", "--json"),
        ("status",),
        ("verdict",),
        ("verdict", "--json"),
    ],
)
def test_a_reader_who_leaves_is_no_verdict(command: tuple[str, ...], small: Path, place: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "coresident", command[0], str(small), *command[1:]],
        cwd=place, stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_version(coresident: Command) -> None:
    told = coresident("--version")
    assert (told.status, told.out) == (0, f"coresident {package.__version__}\n")


def test_a_run_that_is_stopped_early_is_undecided_and_says_so(
    coresident: Command, changed: Change, place: Path
) -> None:
    changed(("echo said;", "sleep 0.4;"))
    told = coresident("run", "small.yaml", "--budget-minutes", "0.01", "--json")
    assert told.status == 3
    verdict = json.loads(told.out)
    assert (verdict["exit_status"], verdict["blocks"]) == (3, {"measured": 1, "needed": 3})
    assert verdict["stopped"].startswith("the budget of")
    assert "1 of 3 blocks measured." in coresident("verdict", "runs/small").out


def test_a_broken_arm_ends_the_run_and_its_last_words_are_told(
    coresident: Command, changed: Change, place: Path
) -> None:
    changed(("echo said;", "test $SPEED = 1 || { echo no such model; exit 1; };"))
    told = coresident("run", "small.yaml")
    assert told.status == 3
    cell = next((place / "runs/small/records").glob("two-*-r0-a1.json")).stem.removesuffix("-r0-a1")
    assert (
        f"its output: coresident logs runs/small {cell}, which ends: no such model; mend it (a changed arm needs another --out)"
        in told.err
    )
    assert "block 2" not in told.out


def test_a_claim_changed_after_data_is_told_by_a_dry_run_and_a_run(coresident: Command, small: Path) -> None:
    changed = ("run", "small.yaml", "--set", "hypotheses.faster.expect.ratio.at_least=1.6")
    note = "faster was changed after data was seen: it is marked post hoc for good"
    assert f"note: {note}" in coresident(*changed, "--dry-run").out
    assert json.loads(coresident(*changed, "--dry-run", "--json").out)["notices"] == [note]
    assert note in coresident(*changed).out.splitlines()


def test_the_folder_of_records_stands_for_its_run(coresident: Command, small: Path) -> None:
    for command in ("verdict", "status", "show", "records"):
        assert (
            coresident(command, str(small / "records")).out.replace("records/records", "records")
            == coresident(command, str(small)).out
        )


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_output_that_is_piped_fits_the_columns_asked_for(
    columns: int, coresident: Command, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = coresident("verdict", str(small)).out.splitlines()
    assert max(map(len, lines)) <= columns


def test_retracting_twice_tells_the_first_reason(coresident: Command, small: Path) -> None:
    name = next((small / "records").glob("one-*-r0-a1.json")).stem
    coresident("retract", str(small), name, "--why", "the fan was off")
    again = coresident("retract", str(small), name, "--why", "other")
    assert again.status == 2 and f"{name} is already retracted: the fan was off" in again.err
    said = " ".join(coresident("verdict", str(small)).out.split())
    assert f"1 record retracted after it was seen: {name} (the fan was off)." in said
    assert "faster (after retraction) is" in said
