"""Writes `record.schema.json`: the record as a JSON Schema, for readers in any language.

`python -m coresident.lab.records.publish`
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coresident.lab.records import checksum
from coresident.lab.records.files import Disk
from coresident.lab.records.schema import VERSION, Record

SCHEMA = Path(__file__).with_name("record.schema.json")


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a record file."""
    record = Record.model_json_schema()
    # Which is the file's, and no part of the record.
    record["properties"][checksum.KEY] = {
        "type": "string",
        "pattern": "^[0-9a-f]{64}$",
        "description": "SHA-256 of the rest as JSON in UTF-8 with sorted keys and no spaces.",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"schema version {VERSION}; made by python -m coresident.lab.records.publish",
        **record,
        "if": {"properties": {"schema_version": {"const": VERSION}}},
        "then": {"required": [checksum.KEY]},
    }


def text() -> str:
    """The published file's content."""
    return json.dumps(schema(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Disk().replace(SCHEMA, text().encode())
