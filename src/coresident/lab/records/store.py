"""The records of one run directory: added, never edited, taken out of account only by a retraction beside
them.

Layout: `records/<cell>-r<repetition>-a<attempt>.json`, one file a record, and
`records/<record>.retraction.json`. Each has a checksum, which is the file's and no part of the record: it is made and
looked at here. Files of schema version 1 have none, and are read without.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from coresident.errors import InternalError, UserError
from coresident.lab.records import checksum, strict
from coresident.lab.records.files import ASIDE, Disk
from coresident.lab.records.schema import READ, Record, Retraction

_RECORD = re.compile(r"(?P<cell>.+)-r(?P<repetition>\d+)-a(?P<attempt>\d+)\.json")
_RETRACTION = re.compile(r"(?P<record>.+-r\d+-a\d+)\.retraction\.json")
_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(frozen=True)
class Stored:
    """A record as it lies on the disk, with the retraction that names it, if there is one."""

    record: Record
    retraction: Retraction | None
    path: Path


class Store:
    """The records under `run`. Writing makes the directory; reading a run without records gives none."""

    def __init__(self, run: Path, disk: Disk | None = None) -> None:
        self.run = run
        self.directory = run / "records"
        self._disk = disk or Disk()
        self._seen: dict[Path, tuple[tuple[int, int, int], Record]] = {}

    def add(self, record: Record) -> Path:
        """Write a record; returns its file. Raises `UserError` if one of that name exists, which then stays
        as it is.
        """
        return self._publish(f"{record.id}.json", record, f"record {record.id}")

    def load(self) -> list[Stored]:
        """All records, retracted ones marked, by file name.

        Raises `UserError` naming the file for anything that is not exactly a record of this version: torn
        or invalid JSON, NaN, duplicate or unknown keys, another schema version, content that its checksum does not
        fit, a name that is not the record's own.
        """
        names = listed(self.directory)
        retractions = {name: self._retraction(path, names) for name, path in names.retractions.items()}
        return [
            Stored(self._record(path), retractions.get(name), path) for name, path in names.records.items()
        ]

    def records(self) -> list[Record]:
        """All records, retracted or not."""
        return [stored.record for stored in self.load()]

    def active(self) -> list[Record]:
        """The records that no retraction names."""
        return [stored.record for stored in self.load() if stored.retraction is None]

    def retractions(self) -> list[tuple[Record, Retraction]]:
        """The records that a retraction names, each with it."""
        return [(one.record, one.retraction) for one in self.load() if one.retraction is not None]

    def retracted(self) -> list[Record]:
        """The records that a retraction names."""
        return [stored.record for stored in self.load() if stored.retraction is not None]

    def retract(self, record_id: str, why: str, date: str) -> Path:
        """Take a record out of every aggregate, for the reason `why`; returns the retraction's file."""
        names = listed(self.directory)
        if record_id not in names.records:
            raise UserError(
                f"{self.run} has no record {record_id!r}", meant(record_id, names.records, self.run)
            )
        if record_id in names.retractions:
            before = self._retraction(names.retractions[record_id], names)
            raise UserError(
                f"{record_id} is already retracted: {before.reason}",
                "nothing was changed: a reason is kept for good",
            )
        if not why.strip():
            raise UserError(
                f"the retraction of {record_id} gives no reason", "say why, for example --why 'fan was off'"
            )
        retraction = Retraction(record=record_id, reason=why, date=date)
        return self._publish(f"{record_id}.retraction.json", retraction, f"a retraction of {record_id}")

    def next_attempt(self, cell_id: str, repetition: int) -> int:
        """The first free attempt number: above all records' and above the directories of attempts that left
        none.
        """
        taken = [0]
        for path in listed(self.directory).records.values():
            found = _RECORD.fullmatch(path.name)
            if found and found["cell"] == cell_id and int(found["repetition"]) == repetition:
                taken.append(int(found["attempt"]))
        begun = self.run / "cells" / cell_id / f"r{repetition}"
        if begun.is_dir():
            taken += [int(one.name[1:]) for one in begun.iterdir() if re.fullmatch(r"a\d+", one.name)]
        return max(taken) + 1

    def sweep(self) -> list[Path]:
        """Remove what killed writers left aside; returns what was removed."""
        return self._disk.sweep(self.run) + self._disk.sweep(self.directory)

    def _publish(self, name: str, content: BaseModel, what: str) -> Path:
        path = self.directory / name
        try:
            text = checksum.sealed(content.model_dump())
        except ValueError as error:
            raise InternalError(f"{what} holds a value that JSON has not: {error}") from None
        self._disk.directory(self.directory)
        try:
            self._disk.publish(path, text)
        except FileExistsError:
            problem = f"{path} exists already, so {what} was not written"
            raise UserError(
                problem, "nothing was replaced; another run may be writing to this directory"
            ) from None
        return path

    def _record(self, path: Path) -> Record:
        # A record is never edited, so a file that is still the same one need not be read again before each
        # cell.
        status = path.stat()
        mark = (status.st_ino, status.st_size, status.st_mtime_ns)
        seen = self._seen.get(path)
        if seen is not None and seen[0] == mark:
            return seen[1]
        record = _read(path, Record, "measure anew")
        if path.stem != record.id:
            raise UserError(f"{path} holds record {record.id!r}, not what its name says", "restore its name")
        self._seen[path] = (mark, record)
        return record

    def _retraction(self, path: Path, names: Listed) -> Retraction:
        retraction = _read(path, Retraction, "retract anew")
        if path.name != f"{retraction.record}.retraction.json":
            raise UserError(
                f"{path} retracts {retraction.record!r}, not what its name says", "restore its name"
            )
        if retraction.record not in names.records:
            raise UserError(f"{path} retracts a record that is not there", "restore the record beside it")
        return retraction


@dataclass(frozen=True)
class Listed:
    """The files of a records directory by record id."""

    records: dict[str, Path]
    retractions: dict[str, Path]


def listed(directory: Path) -> Listed:
    """What lies in a records directory, sorted by name; files written aside are passed over.

    Raises `UserError` for a JSON file that is neither a record's nor a retraction's by its name.
    """
    records: dict[str, Path] = {}
    retractions: dict[str, Path] = {}
    for path in _entries(directory):
        if path.name.startswith(ASIDE) or path.suffix != ".json":
            continue
        if found := _RETRACTION.fullmatch(path.name):
            retractions[found["record"]] = path
        elif _RECORD.fullmatch(path.name):
            records[path.stem] = path
        else:
            raise UserError(f"{path} is not named as a record is", "move it out of the records directory")
    return Listed(records, retractions)


def meant(given: str, names: Collection[str], run: Path) -> str:
    """The remedy for a record `given` that `run` has not: those that begin so, else one that is written nearly so, else
    where all of them (there may be thousands) are listed.
    """
    begun = sorted(name for name in names if given and name.startswith(given))
    near = begun[:3] or difflib.get_close_matches(given, names, 1)
    if not near:
        return f"coresident records {shlex.quote(str(run))} lists them"
    more = f" (or {len(begun) - 3} more that begin so)" if len(begun) > 3 else ""
    return f"did you mean {' or '.join(map(repr, near))}{more}?"


def _entries(directory: Path) -> Iterable[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        reason = (error.strerror or "unknown error").lower()
        raise UserError(f"{directory} cannot be read: {reason}", "give a readable run directory") from None


def _read(path: Path, model: type[_Model], anew: str) -> _Model:
    try:
        value = strict.parse(path.read_bytes())
        check_version(path, value)
        changed = checksum.broken(value, required=value["schema_version"] > 1)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not strict JSON: {error}", "restore the file, or move it away") from None
    except OSError as error:
        reason = (error.strerror or "unknown error").lower()
        raise UserError(f"{path} cannot be read: {reason}", "make it readable") from None
    value.pop(checksum.KEY, None)
    try:
        read = model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        what = f"{key}: {first['msg'][0].lower()}{first['msg'][1:]}"
        raise UserError(f"{path} is not a record: {what}", "restore the file, or move it away") from None
    if changed:
        problem = f"{path} was changed after it was written: {changed}"
        raise UserError(problem, f"restore the file, or move it away and {anew}")
    return read


def check_version(path: Path, value: Any) -> None:
    """Refuse what another version of the schema wrote, before anything else is complained about."""
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version not in READ or isinstance(version, bool):
        problem = (
            f"{path} has schema_version {version!r}, and this coresident reads {' and '.join(map(str, READ))}"
        )
        raise UserError(problem, "use the version of coresident that wrote it")
