"""A record that was edited after it was written is refused; one of a version without checksums is read as before."""

from __future__ import annotations

import hashlib
import json
import math

import pytest

from coresident.errors import UserError
from coresident.lab.records import checksum, strict
from coresident.lab.records.schema import Control
from coresident.lab.records.store import Store

CONTROLS = {"finite": Control(asked="finite", ran={"numbers": 3}, state="passed")}


def _older(value):
    """The file of a version that wrote no checksums."""
    value["schema_version"] = 1
    value.pop("checksum", None)


EDITS = {
    "a number": lambda it: it["metrics"]["speed"].update(value=1.0000000000000002),
    "a number's type": lambda it: it["metrics"]["speed"].update(value=1),
    "a metric's name": lambda it: it["metrics"].update(haste=it["metrics"].pop("speed")),
    "the environment": lambda it: it["environment"].update(host="there"),
    "a control": lambda it: it["controls"]["finite"].update(ran={"numbers": 4}),
    "the status": lambda it: it.update(status="failed"),
    "what has a default": lambda it: it.pop("clock_step"),
    "the checksum": lambda it: it.update(checksum="0" * 64),
    "the checksum's type": lambda it: it.update(checksum=None),
    "the version": lambda it: it.update(schema_version=1),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_what_was_edited_is_refused_with_its_file_and_what_to_do(store, cell, record, edit):
    path = store.add(record(cell("fork"), environment={"host": "here"}, controls=CONTROLS))
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))
    with pytest.raises(UserError) as caught:
        Store(store.run).load()
    wrong = "was changed after it was written: its checksum does not fit its content"
    assert caught.value.problem == f"{path} {wrong}"
    assert caught.value.remedy == "restore the file, or move it away and measure anew"


def test_a_checksum_cannot_be_left_out_of_a_version_that_has_them(store, cell, record):
    path = store.add(record(cell("fork")))
    value = json.loads(path.read_text())
    del value["checksum"]
    path.write_text(json.dumps(value))
    with pytest.raises(UserError, match="was changed after it was written: it has no checksum"):
        store.load()


def test_a_record_of_a_version_without_checksums_is_read_as_before(store, cell, record):
    one = record(cell("fork"))
    path = store.add(one)
    value = json.loads(path.read_text())
    _older(value)
    path.write_text(json.dumps(value))
    assert store.records() == [one.model_copy(update={"schema_version": 1})]


def test_how_the_file_is_laid_out_does_not_matter(store, cell, record):
    one = record(cell("fork"), environment={"é": "\u2028", "b": 1})
    path = store.add(one)
    path.write_text(json.dumps(json.loads(path.read_text()), indent=2, sort_keys=True))
    assert Store(store.run).records() == [one]


def test_every_float_and_every_key_survives(store, cell, record):
    numbers = [0.1 + 0.2, 5e-324, -0.0, 1e22, 1e-7, math.pi, 2.0**53, 1.7976931348623157e308]
    written = record(
        cell("fork"), telemetry={"floats": numbers, "large": 10**40, "of numbers": {9: 1, 10: (2, 3)}}
    )
    store.add(written)
    [found] = Store(store.run).records()
    assert repr(found.telemetry["floats"]) == repr(numbers)
    assert found.telemetry["of numbers"] == {"9": 1, "10": [2, 3]}


def test_an_edited_retraction_is_refused_too(store, cell, record):
    one = record(cell("fork"))
    store.add(one)
    path = store.retract(one.id, "the fan was off", "2026-01-02")
    path.write_text(path.read_text().replace("fan", "lid"))
    with pytest.raises(UserError) as caught:
        store.load()
    assert str(path) in caught.value.problem and "its checksum does not fit" in caught.value.problem
    assert caught.value.remedy == "restore the file, or move it away and retract anew"


def test_a_retraction_of_a_version_without_checksums_is_read_as_before(store, cell, record):
    one = record(cell("fork"))
    store.add(one)
    path = store.retract(one.id, "the fan was off", "2026-01-02")
    value = json.loads(path.read_text())
    _older(value)
    path.write_text(json.dumps(value))
    assert store.retracted() == [one]


def test_the_checksum_is_that_of_the_rest_as_canonical_json():
    line = checksum.sealed({"b": [1.0, None], "a": "é"})
    text = '{"a":"é","b":[1.0,null]}'
    expected = hashlib.sha256(text.encode()).hexdigest()
    assert strict.parse(line) == {"b": [1.0, None], "a": "é", "checksum": expected}
