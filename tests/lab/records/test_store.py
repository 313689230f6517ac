"""Records are added and never edited; what is not exactly a record is refused by name."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coresident.errors import InternalError, UserError
from coresident.lab.records.files import ASIDE
from coresident.lab.records.schema import Series
from coresident.lab.records.store import Store, meant


def test_a_record_is_read_as_it_was_written(store, cell, record):
    written = record(
        cell("fork"),
        speed=0.1 + 0.2,
        series={"loss": Series(digest="d", length=2, values=[1e-300, None])},
        telemetry={"é": [1, 2.5, None, True, {"a": "b\n"}]},
    )
    path = store.add(written)
    assert path == store.directory / f"{written.id}.json"
    [stored] = Store(store.run).load()
    assert stored.record == written and stored.retraction is None and stored.path == path


def test_a_run_without_records_has_none(store):
    assert store.load() == [] and store.active() == []
    assert not store.run.exists()


def test_the_second_writer_of_a_name_gets_an_error_and_nothing_is_lost(store, cell, record):
    first = record(cell("fork"), speed=1.0)
    store.add(first)
    with pytest.raises(UserError) as caught:
        Store(store.run).add(record(cell("fork"), speed=2.0))
    assert f"{first.id}.json exists already" in caught.value.problem
    assert "nothing was replaced" in caught.value.remedy
    assert store.active() == [first]


def test_two_labs_at_once_lose_nothing(tmp_path, cell, record):
    program = """
import sys
from pathlib import Path
from coresident.errors import UserError
from coresident.lab.records.schema import Record
from coresident.lab.records.store import Store
store, template = Store(Path(sys.argv[1])), Record.model_validate_json(sys.stdin.read())
for attempt in range(1, 41):
    try:
        store.add(template.model_copy(update={"attempt": attempt, "reason": sys.argv[2]}))
        print(attempt)
    except UserError:
        pass
"""
    labs = [
        subprocess.Popen(
            [sys.executable, "-c", program, tmp_path, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("first", "second")
    ]
    wrote = {}
    text = record(cell("fork")).model_dump_json()
    for lab in labs:
        assert lab.stdin is not None
        lab.stdin.write(text)
        lab.stdin.close()
    for name, lab in zip(("first", "second"), labs, strict=True):
        assert lab.stdout is not None
        wrote[name] = set(map(int, lab.stdout.read().split()))
        assert lab.wait() == 0
    assert wrote["first"] | wrote["second"] == set(range(1, 41))
    assert not wrote["first"] & wrote["second"]
    assert {(one.attempt, one.reason) for one in Store(tmp_path).active()} == {
        (attempt, name) for name, attempts in wrote.items() for attempt in attempts
    }


def test_a_lab_killed_at_any_step_leaves_the_record_or_none(tmp_path, cell, record):
    program = """
import os, signal, sys
from pathlib import Path
from coresident.lab.records.files import Disk
from coresident.lab.records.schema import Record
from coresident.lab.records.store import Store
done = 0
def stepping(name):
    plain = getattr(Disk, name)
    def step(self, *arguments):
        global done
        if done == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1
        return plain(self, *arguments)
    return step
steps = ("directory", "create", "write", "sync", "link", "unlink", "sync_directory")
Killed = type("Killed", (Disk,), {name: stepping(name) for name in steps})
Store(Path(sys.argv[1]), Killed()).add(Record.model_validate_json(sys.stdin.read()))
"""
    one = record(cell("fork"))
    seen = []
    for step in range(20):
        run = tmp_path / str(step)
        done = subprocess.run(
            [sys.executable, "-c", program, run, str(step)], input=one.model_dump_json(), text=True
        )
        found = Store(run).active()
        assert found in ([], [one])
        seen.append((done.returncode, len(found)))
        # The next lab sweeps and goes on as if nothing had been there.
        again = Store(run)
        again.sweep()
        assert [path.name for path in again.directory.glob(f"{ASIDE}*")] == []
        if not found:
            again.add(one)
        assert again.active() == [one]
        if done.returncode == 0:
            break
    assert {code for code, _ in seen[:-1]} == {-signal.SIGKILL} and seen[-1] == (0, 1)
    assert {count for _, count in seen[:-1]} == {0, 1}


BAD = {
    "torn": (lambda text: text[: len(text) // 2], "not strict JSON"),
    "empty": (lambda text: "", "not strict JSON"),
    "two in one": (lambda text: text + text, "not strict JSON"),
    "NaN": (lambda text: text.replace('"value":1.0', '"value":NaN'), "NaN is not a finite number"),
    "NaN where anything may stand": (
        lambda text: text.replace('"telemetry":{}', '"telemetry":{"a":NaN}'),
        "NaN",
    ),
    "infinity": (lambda text: text.replace('"value":1.0', '"value":-Infinity'), "-Infinity"),
    "1e400": (
        lambda text: text.replace('"telemetry":{}', '"telemetry":{"a":1e400}'),
        "number 1e400 is not finite",
    ),
    "duplicate key": (
        lambda text: text.replace('"attempt":1', '"attempt":1,"attempt":2'),
        "duplicate key 'attempt'",
    ),
    "duplicate inside": (
        lambda text: text.replace('"unit":"1/s"', '"unit":"1/s","unit":"s"'),
        "duplicate key 'unit'",
    ),
    "a metric as text": (lambda text: text.replace('"value":1.0', '"value":"1.0"'), "metrics.speed.value"),
    "a metric as true": (lambda text: text.replace('"value":1.0', '"value":true'), "metrics.speed.value"),
    "unknown key": (lambda text: text.replace('"reason":""', '"reason":"","x":1'), "x: extra inputs"),
    "missing key": (lambda text: text.replace('"status":"ok",', ""), "status: field required"),
    "unknown status": (
        lambda text: text.replace('"status":"ok"', '"status":"fine"'),
        "status: input should be",
    ),
    "newer schema": (
        lambda text: text.replace('"schema_version":2', '"schema_version":3'),
        "has schema_version 3",
    ),
    "no version": (lambda text: text.replace('"schema_version":2,', ""), "has schema_version None"),
    "no object": (lambda text: "[]", "has schema_version None"),
    "deep": (lambda text: "[" * 100_000, "not strict JSON"),
    "not UTF-8": (lambda text: b"\xff" + text.encode(), "not strict JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_exactly_a_record_is_refused_by_its_file(store, cell, record, name):
    change, problem = BAD[name]
    path = store.add(record(cell("fork")))
    text = change(path.read_text())
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        Store(store.run).load()
    assert str(path) in caught.value.problem and problem in caught.value.problem
    assert caught.value.remedy


def test_the_version_is_named_before_what_else_differs(store, cell, record):
    path = store.add(record(cell("fork")))
    path.write_text('{"schema_version": 7, "anything": []}')
    with pytest.raises(UserError, match="has schema_version 7, and this coresident reads 1 and 2"):
        store.load()


def test_a_value_that_json_has_not_is_never_written(store, cell, record):
    with pytest.raises(InternalError, match="holds a value that JSON has not"):
        store.add(record(cell("fork"), telemetry={"a": float("nan")}))
    assert store.load() == []


def test_only_json_files_are_looked_at_and_those_must_be_records(store, cell, record):
    store.add(record(cell("fork")))
    (store.directory / "notes.txt").write_text("x")
    (store.directory / f"{ASIDE}0123").write_text('{"half')
    assert len(store.load()) == 1
    (store.directory / "other.json").write_text("{}")
    with pytest.raises(UserError, match=r"other\.json is not named as a record is"):
        store.load()


def test_a_retraction_takes_a_record_out_and_leaves_it_visible(store, cell, record):
    kept, taken = record(cell("fork"), 0), record(cell("fork"), 1)
    store.add(kept)
    path = store.add(taken)
    before = path.read_bytes()
    store.retract(taken.id, "fan was off", "2026-01-02")
    assert path.read_bytes() == before
    assert store.active() == [kept] and store.retracted() == [taken]
    retraction = {one.record.id: one.retraction for one in store.load()}[taken.id]
    assert retraction is not None and (retraction.reason, retraction.date) == ("fan was off", "2026-01-02")


def test_a_retraction_must_name_a_record_and_a_reason_and_is_made_once(store, cell, record):
    one = record(cell("fork"))
    store.add(one)
    with pytest.raises(UserError) as caught:
        store.retract(one.id.replace("-a1", "-a2"), "x", "2026-01-02")
    assert one.id in caught.value.remedy
    with pytest.raises(UserError, match="gives no reason"):
        store.retract(one.id, " ", "2026-01-02")
    store.retract(one.id, "x", "2026-01-02")
    with pytest.raises(UserError, match="is already retracted: x"):
        store.retract(one.id, "y", "2026-01-03")
    assert [(gone, why.reason) for gone, why in store.retractions()] == [(one, "x")]


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("xx", "coresident records 'a run' lists them"),
        ("", "coresident records 'a run' lists them"),
        ("solo-1-r0", "did you mean 'solo-1-r0-a1'?"),
        ("fork-1-r", "did you mean 'fork-1-r0-a1' or 'fork-1-r1-a1'?"),
        (
            "solo-2-r",
            "did you mean 'solo-2-r0-a1' or 'solo-2-r1-a1' or 'solo-2-r2-a1' (or 2 more that begin so)?",
        ),
        ("slo-1-r0-a1", "did you mean 'solo-1-r0-a1'?"),
    ],
)
def test_only_what_is_near_is_suggested_for_a_record_that_is_not_there(given, remedy):
    names = ["solo-1-r0-a1", "fork-1-r1-a1", "fork-1-r0-a1", *(f"solo-2-r{number}-a1" for number in range(5))]
    assert meant(given, names, Path("a run")) == remedy


def test_a_retraction_of_what_is_not_there_is_refused(store, cell, record):
    one = record(cell("fork"))
    path = store.add(one)
    retraction = store.retract(one.id, "x", "2026-01-02")
    path.unlink()
    with pytest.raises(UserError, match="retracts a record that is not there"):
        store.load()
    store.add(one)
    retraction.rename(retraction.with_name("other-r0-a1.retraction.json"))
    with pytest.raises(UserError, match="not what its name says"):
        store.load()


def test_a_record_under_another_records_name_is_refused(store, cell, record):
    path = store.add(record(cell("fork")))
    path = path.rename(path.with_name(path.name.replace("-a1", "-a2")))
    with pytest.raises(UserError, match="not what its name says") as caught:
        store.load()
    assert str(path) in caught.value.problem


def test_the_next_attempt_is_above_records_and_begun_directories(store, cell, record):
    fork, native = cell("fork"), cell("native")
    assert store.next_attempt(fork.id, 0) == 1
    for attempt in (1, 2, 10):
        store.add(record(fork, 0, attempt=attempt))
    store.add(record(fork, 1, attempt=4))
    assert store.next_attempt(fork.id, 0) == 11
    assert store.next_attempt(fork.id, 1) == 5
    assert store.next_attempt(native.id, 0) == 1
    (store.run / "cells" / fork.id / "r1" / "a7").mkdir(parents=True)
    assert store.next_attempt(fork.id, 1) == 8


def test_a_store_sees_what_others_add_and_what_was_changed(store, cell, record):
    first, second = record(cell("fork"), 0), record(cell("fork"), 1)
    path = store.add(first)
    assert store.active() == [first]
    Store(store.run).add(second)
    assert store.active() == [first, second]
    path.write_text(json.dumps({"schema_version": 3}))
    with pytest.raises(UserError, match="schema_version 3"):
        store.load()
