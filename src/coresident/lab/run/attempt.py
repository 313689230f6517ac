"""Where one attempt at a cell lives: its directories, and the file that tells the cell what it is."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coresident.lab.records.schema import Block, CellRef
from coresident.lab.run.machine.devices import Device
from coresident.workload import CELL, EVENTS, WORK

LARGEST_HASHED = 256 * 2**20


@dataclass(frozen=True)
class Attempt:
    """`cells/<cell>/r<repetition>/a<number>/` of a run, with `events`, `telemetry` and `work` below it.

    A resumable workload's `work` lies beside its attempts, so that the next one finds what the last one left.
    """

    number: int
    place: Path
    work: Path

    @classmethod
    def make(cls, out: Path, cell: str, repetition: int, number: int, resumable: bool) -> Attempt:
        """Make the directories."""
        together = out / "cells" / cell / f"r{repetition}"
        place = together / f"a{number}"
        attempt = cls(number, place, together / "work" if resumable else place / "work")
        for directory in (attempt.events, attempt.samples.parent, attempt.work):
            directory.mkdir(parents=True, exist_ok=True)
        return attempt

    @property
    def events(self) -> Path:
        """Where the cell's processes report."""
        return self.place / "events"

    @property
    def samples(self) -> Path:
        """What telemetry saw, over time."""
        return self.place / "telemetry" / "samples.jsonl"

    @property
    def _description(self) -> Path:
        return self.place / "cell.json"

    def outputs(self, apart: bool) -> tuple[Path, Path]:
        """Where standard output and error go: one log, or two files where a program's output may be wanted alone."""
        return (
            (self.place / "stdout", self.place / "stderr")
            if apart
            else (self.place / "log", self.place / "log")
        )

    def describe(
        self,
        cell: CellRef,
        block: Block,
        device: Device,
        cores: Sequence[Sequence[int]],
        controls: Sequence[str],
    ) -> None:
        """Write what the cell's processes may know about themselves."""
        described = {
            "cell": cell.model_dump(),
            "repetition": block.repetition,
            "generation": block.generation,
            "attempt": self.number,
            "device": device.uuid,
            "cpus": [list(worker) for worker in cores],
            "controls": list(controls),
        }
        self._description.write_text(json.dumps(described, indent=1), encoding="utf-8")

    def variables(self) -> Mapping[str, str]:
        """The worker protocol's environment variables."""
        return {EVENTS: str(self.events), CELL: str(self._description), WORK: str(self.work)}

    def artifacts(self) -> dict[str, str]:
        """SHA-256 of every file that the cell left in its work directory (larger ones by size only)."""
        found = {}
        for path in sorted(self.work.rglob("*")):
            if not path.is_file() or path.is_symlink():
                continue
            size = path.stat().st_size
            name = str(path.relative_to(self.work))
            if size > LARGEST_HASHED:
                found[name] = f"size:{size}"
                continue
            try:
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
            except PermissionError:
                # The modes of its files are the cell's business, and no reason to lose its record.
                found[name] = f"unreadable, size:{size}"
        return found

    def drop_empty_work(self) -> None:
        """Remove the work directory if nothing was left in it."""
        if self.work.is_dir() and not any(self.work.iterdir()):
            shutil.rmtree(self.work, ignore_errors=True)
