"""The published JSON Schema says what the code says."""

from __future__ import annotations

import json
import subprocess
import sys

from coresident.lab.records.publish import SCHEMA, text


def test_the_published_schema_is_current():
    assert SCHEMA.read_text() == text(), "run python -m coresident.lab.records.publish"


def test_it_forbids_unknown_keys_and_pins_the_version():
    schema = json.loads(SCHEMA.read_text())
    assert schema["additionalProperties"] is False
    assert schema["properties"]["schema_version"]["enum"] == [1, 2]
    assert set(schema["required"]) >= {"study", "cell", "conditions", "block", "attempt", "status", "started"}


def test_it_asks_for_a_checksum_from_version_2_on():
    schema = json.loads(SCHEMA.read_text())
    assert schema["properties"]["checksum"]["type"] == "string"
    assert schema["if"] == {"properties": {"schema_version": {"const": 2}}}
    assert schema["then"] == {"required": ["checksum"]}


def test_publishing_again_changes_nothing():
    before = SCHEMA.read_bytes()
    subprocess.run([sys.executable, "-m", "coresident.lab.records.publish"], check=True)
    assert SCHEMA.read_bytes() == before
