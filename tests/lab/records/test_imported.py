"""Results of others as records: as they were, all or none, and never mixed with what was measured here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coresident.errors import MachineError, UserError
from coresident.importing import Imported, ImportedControl, Importer
from coresident.lab.records.imported import bring, records_of
from coresident.lab.records.schema import Record
from coresident.lab.records.store import Store


@pytest.fixture
def one(tmp_path: Path) -> Imported:
    file = tmp_path / "result.txt"
    file.write_text("published")
    return Imported(
        file=file,
        arm="theirs",
        factors={"n": 2},
        parameters={"n": 2, "steps": 10},
        conditions={"driver": "1"},
        status="ok",
        reason="",
        started="2026-01-01T00:00:00+00:00",
        duration=5.0,
        metrics={"speed": (3.0, "1/s")},
        samples={"speed": [2.0, 4.0]},
        series={"loss": [0.7, None]},
        controls=[
            ImportedControl("told", "a", "a", True),
            ImportedControl("untold", "a", None, None, "not said"),
        ],
    )


def importer(*results: Imported) -> Importer:
    return Importer("theirs", "results of theirs", "command", lambda _: list(results))


def test_a_result_becomes_a_record_as_it_was(one: Imported, tmp_path: Path) -> None:
    (record,) = bring(importer(one), tmp_path, tmp_path / "run")
    assert Store(tmp_path / "run").load()[0].record == record
    assert record.id.startswith("theirs-n-2-")
    assert (record.status, record.study.name, record.cell.workload) == ("ok", "imported-theirs", "command")
    assert (record.metrics["speed"].value, record.metrics["speed"].samples) == (3.0, [2.0, 4.0])
    assert record.series["loss"].values == [0.7, None]
    assert {name: control.state for name, control in record.controls.items()} == {
        "told": "passed", "untold": "unverified",
    }  # fmt: skip
    assert record.environment["imported"] == {"by": "theirs", "file": "result.txt"}
    assert list(record.artifacts) == ["result.txt"]


def test_a_failed_control_makes_it_invalid_but_hides_no_other_end(one: Imported) -> None:
    failed = [ImportedControl("told", "a", "b", False, "asked a, ran b")]
    spoilt, ended = records_of(
        importer(),
        [
            replace(one, controls=failed),
            replace(one, controls=failed, status="nonfinite", reason="a loss is NaN"),
        ],
    )
    assert (spoilt.status, spoilt.reason) == ("invalid", "told: asked a, ran b")
    assert (ended.status, ended.reason) == ("nonfinite", "a loss is NaN")
    assert ended.controls["told"].state == "failed"


def test_equal_cells_are_repetitions_and_others_are_not(one: Imported) -> None:
    others = [
        replace(one, arm="ours"),
        replace(one, parameters={"n": 2, "steps": 20}),
        replace(one, conditions={}),
    ]
    records = records_of(importer(), [one, one, *others])
    assert [record.block.repetition for record in records] == [0, 1, 0, 0, 2]
    assert len({record.cell.hash for record in records}) == 3
    assert records[4].conditions.hash != records[0].conditions.hash
    assert all(record.block.members == [record.cell.id] for record in records), (
        "nothing says what ran beside what"
    )


def test_a_run_directory_that_is_there_is_left_as_it_is(one: Imported, tmp_path: Path) -> None:
    bring(importer(one), tmp_path, tmp_path / "run")
    with pytest.raises(UserError, match="run is there already"):
        bring(importer(one, one), tmp_path, tmp_path / "run")
    assert len(Store(tmp_path / "run").load()) == 1


def test_all_of_it_or_nothing_is_written(
    one: Imported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Store.add

    def until_full(store: Store, record: Record) -> Path:
        if list(store.directory.glob("*.json")):
            raise OSError(28, "No space left on device")
        return add(store, record)

    monkeypatch.setattr(Store, "add", until_full)
    with pytest.raises(MachineError, match="cannot be written: No space left"):
        bring(importer(one, one), tmp_path, tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.txt"]
