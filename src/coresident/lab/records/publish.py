"""Writes `record.schema.json`: the record as a JSON Schema, for readers in any language.

`python -m coresident.lab.records.publish`
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coresident.lab.records.files import Disk
from coresident.lab.records.schema import VERSION, Record

SCHEMA = Path(__file__).with_name("record.schema.json")


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a record file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"schema version {VERSION}; made by python -m coresident.lab.records.publish",
        **Record.model_json_schema(),
    }


def text() -> str:
    """The published file's content."""
    return json.dumps(schema(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Disk().replace(SCHEMA, text().encode())
