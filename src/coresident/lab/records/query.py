"""Records as tables: DuckDB over the JSON files, with every column's type stated.

Types are stated because a sniffed one depends on the first rows it happens to see. DuckDB reads what is not
quite JSON, takes "15" for 15 and an empty file for nothing, so the store, which is strict, reads every file
first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from coresident.errors import UserError
from coresident.lab.records.store import Store

if TYPE_CHECKING:
    import pandas

_METRICS = "MAP(VARCHAR, STRUCT(value DOUBLE, unit VARCHAR, scope VARCHAR))"
_COLUMNS = {
    "study": "STRUCT(name VARCHAR, fingerprint VARCHAR)",
    "cell": "STRUCT(id VARCHAR, workload VARCHAR, arm VARCHAR, factors JSON, hash VARCHAR)",
    "conditions": "STRUCT(hash VARCHAR)",
    "block": "STRUCT(repetition INTEGER, generation INTEGER)",
    "attempt": "INTEGER",
    "status": "VARCHAR",
    "reason": "VARCHAR",
    "started": "VARCHAR",
    "duration": "DOUBLE",
    "metrics": _METRICS,
}

# A record without metrics keeps one row, so that what failed stays visible.
_ROWS = """
SELECT parse_filename(filename, true) AS record, study.name AS study, study.fingerprint AS fingerprint,
       cell.id AS cell, cell.workload AS workload, cell.arm AS arm, CAST(cell.factors AS VARCHAR) AS factors,
       cell.hash AS cell_hash, conditions.hash AS conditions_hash, block.repetition AS repetition,
       block.generation AS generation, attempt, status, coalesce(reason, '') AS reason,
       list_contains($retracted, parse_filename(filename, true)) AS retracted,
       one.key AS metric, one.value.value AS value, one.value.unit AS unit,
       CASE WHEN one.key IS NULL THEN NULL ELSE coalesce(one.value.scope, 'session') END AS scope,
       started, duration
FROM (SELECT *, unnest(CASE WHEN cardinality(metrics) > 0 THEN map_entries(metrics) ELSE [NULL] END) AS one
      FROM (SELECT filename, unnest(json_transform_strict(content, $structure)) FROM {files}))
ORDER BY record, metric
"""

# One record a repetition: the newest generation's, so that a block measured anew is not counted twice.
_MEDIANS = """
SELECT min(study) AS study, min(cell) AS cell, min(arm) AS arm, min(factors) AS factors,
       cell_hash, conditions_hash, metric, unit, scope,
       median(value) AS median, min(value) AS min, max(value) AS max, count(*) AS n
FROM (SELECT * FROM records WHERE status = 'ok' AND NOT retracted AND metric IS NOT NULL
      QUALIFY row_number() OVER (PARTITION BY cell_hash, conditions_hash, repetition, metric, unit, scope
                                 ORDER BY generation DESC, attempt DESC) = 1)
GROUP BY ALL ORDER BY ALL
"""


def records(path: str | Path) -> pandas.DataFrame:
    """One row for each record and metric of a run directory (or of its `records` folder), sorted.

    Columns: record, study, fingerprint, cell, workload, arm, factors (JSON), cell_hash, conditions_hash,
    repetition, generation, attempt, status, reason, retracted, metric, value, unit, scope, started,
    duration (s). A record without metrics has one row, with none. Raises `UserError` naming the file: not a
    record, torn, or of another schema version.
    """
    table: pandas.DataFrame = _rows(path).sql("FROM records").df()
    return table


def aggregate(path: str | Path) -> pandas.DataFrame:
    """Median, min, max and n of each metric by cell hash and conditions hash; only records that are ok and
    not retracted.

    Nothing is pooled across either hash, across units or across scopes. A repetition counts once: its
    newest generation.
    """
    table: pandas.DataFrame = _rows(path).sql(_MEDIANS).df()
    return table


def write_csv(path: str | Path, stream: IO[str]) -> None:
    """`records` as CSV with a header line, numbers in full precision."""
    records(path).to_csv(stream, index=False, lineterminator="\n")


def _rows(path: str | Path) -> Any:
    import duckdb

    stored = Store(_run(Path(path))).load()
    connection = duckdb.connect(":memory:")
    # For thousands of small files more threads cost more than they give; a progress bar would spoil --csv.
    connection.execute("SET threads = 1; SET enable_progress_bar = false")
    values = {
        "files": [str(one.path) for one in stored],
        "structure": json.dumps(_COLUMNS),
        "retracted": [one.record.id for one in stored if one.retraction is not None],
    }
    # read_text refuses an empty list of files.
    files = "read_text($files)" if stored else "(SELECT '' AS filename, '' AS content WHERE len($files) > 0)"
    connection.execute("CREATE TEMP TABLE records AS " + _ROWS.replace("{files}", files), values)
    return connection


def _run(path: Path) -> Path:
    run = path.parent if path.name == "records" else path
    if not (run / "records").is_dir():
        raise UserError(
            f"{path} is not a run directory: it has no records", "give the --out of a run, such as runs/demo"
        )
    return run
