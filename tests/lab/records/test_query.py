"""Records as tables with stated types."""

from __future__ import annotations

import csv
import io
import json

import pytest

import coresident
from coresident.errors import UserError
from coresident.lab.records import checksum, query
from coresident.lab.records.schema import MetricValue

COLUMNS = [
    "record",
    "study",
    "fingerprint",
    "cell",
    "workload",
    "arm",
    "factors",
    "cell_hash",
    "conditions_hash",
    "repetition",
    "generation",
    "attempt",
    "status",
    "reason",
    "retracted",
    "metric",
    "value",
    "unit",
    "scope",
    "started",
    "duration",
]


def test_one_row_for_each_record_and_metric(store, cell, record):
    metrics = {
        "b": MetricValue(value=2, unit="s", scope="cumulative"),
        "a": MetricValue(value=0.1 + 0.2, unit="MiB"),
    }
    store.add(record(cell("fork"), metrics=metrics))
    table = query.records(store.run)
    assert list(table.columns) == COLUMNS
    assert table[["metric", "value", "unit", "scope"]].values.tolist() == [
        ["a", 0.1 + 0.2, "MiB", "session"],
        ["b", 2.0, "s", "cumulative"],
    ]
    assert table.loc[0, "factors"] == '{"learners":2}'
    assert coresident.records(store.run / "records").equals(table)


def test_names_with_dots_stay_whole(store, cell, record):
    one = record(cell("fork.v1.2"))
    store.add(one)
    store.retract(one.id, "x", "2026-01-02")
    [row] = query.records(store.run).itertuples()
    assert (row.record, row.arm, row.retracted) == (one.id, "fork.v1.2", True)


def test_a_record_without_metrics_keeps_a_row(store, cell, record):
    store.add(record(cell("fork"), status="failed", reason="no, really", metrics={}))
    [row] = query.records(store.run).itertuples()
    assert (row.status, row.reason, row.metric) == ("failed", "no, really", None)
    assert query.aggregate(store.run).empty


def test_a_fraction_after_many_whole_numbers_stays_a_fraction(store, cell, record):
    one = record(cell("fork"))
    store.directory.mkdir(parents=True)
    for attempt in range(1, 2101):
        value = "1.5" if attempt == 2100 else "1"
        text = (
            one.model_dump_json()
            .replace('"attempt":1', f'"attempt":{attempt}')
            .replace('"value":1.0', f'"value":{value}')
        )
        (store.directory / f"{one.id[:-1]}{attempt}.json").write_bytes(checksum.sealed(json.loads(text)))
    assert query.records(store.run)["value"].max() == 1.5


@pytest.mark.parametrize("status", ["failed", "timeout", "oom", "nonfinite", "interrupted", "invalid"])
def test_only_what_is_ok_enters_an_aggregate(store, cell, record, status):
    store.add(record(cell("fork"), 0, status=status, speed=5.0))
    assert query.aggregate(store.run).empty
    store.add(record(cell("fork"), 1, speed=7.0))
    [row] = query.aggregate(store.run).itertuples()
    assert (row.median, row.n) == (7.0, 1)


def test_a_block_measured_anew_counts_once(store, cell, record):
    store.add(record(cell("fork"), 0, generation=0, attempt=1, speed=1.0))
    store.add(record(cell("fork"), 0, generation=1, attempt=2, speed=2.0))
    [row] = query.aggregate(store.run).itertuples()
    assert (row.median, row.n) == (2.0, 1)


def test_units_and_scopes_are_not_pooled(store, cell, record):
    for repetition, (unit, scope) in enumerate([("s", "session"), ("ms", "session"), ("s", "cumulative")]):
        metrics = {"time": MetricValue(value=1.0, unit=unit, scope=scope)}
        store.add(record(cell("fork"), repetition, metrics=metrics))
    assert query.aggregate(store.run)["n"].tolist() == [1, 1, 1]


def test_no_records_are_an_empty_table(store):
    store.directory.mkdir(parents=True)
    assert list(query.records(store.run).columns) == COLUMNS
    assert query.records(store.run).empty and query.aggregate(store.run).empty


def test_csv_keeps_every_digit_and_every_line(store, cell, record):
    store.add(record(cell("fork"), status="failed", reason='two\nlines, "quoted"', speed=1 / 3))
    stream = io.StringIO()
    query.write_csv(store.run, stream)
    [row] = csv.DictReader(io.StringIO(stream.getvalue()))
    assert float(row["value"]) == 1 / 3 and row["reason"] == 'two\nlines, "quoted"'
    assert list(row) == COLUMNS


def test_a_torn_file_is_an_error_that_names_it(store, cell, record):
    store.add(record(cell("fork"), 0))
    path = store.add(record(cell("fork"), 1))
    path.write_bytes(path.read_bytes()[:200])
    for ask in (query.records, query.aggregate):
        with pytest.raises(UserError, match=path.name):
            ask(store.run)


def test_another_schema_version_is_refused_by_name(store, cell, record):
    path = store.add(record(cell("fork")))
    path.write_text(path.read_text().replace('"schema_version":2', '"schema_version":3'))
    with pytest.raises(UserError, match=r"has schema_version 3"):
        query.records(store.run)


def test_what_is_no_run_directory_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a run directory"):
        query.records(tmp_path / "nowhere")
