"""An arm that never works: measuring the rest beside it would cost hours and could settle nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from coresident.lab.records.generations import FAILURES
from coresident.lab.records.schema import Record
from coresident.lab.verdict import words

# How much is read from the end, and how much of a line is told.
_TAIL, _SHOWN = 16384, 300


def told(used_up: Iterable[str], records: Iterable[Record], out: Path) -> str:
    """What to say of the first of `used_up` (ids of cells) that has no ok record; "" where each has one.

    `records` are those that count. Names the cell, its reason, where its output is and how that ends.
    """
    by_cell: dict[str, list[Record]] = {}
    for record in records:
        by_cell.setdefault(record.cell.id, []).append(record)
    for cell in used_up:
        mine = by_cell.get(cell, [])
        newest = max((record.started, record.conditions.hash) for record in mine)[1] if mine else ""
        # Under other conditions it was another program, or another machine.
        mine = [record for record in mine if record.conditions.hash == newest]
        if mine and all(record.status != "ok" for record in mine):
            return _sentence(max(mine, key=lambda record: (record.started, record.attempt)), mine, out)
    return ""


def _sentence(last: Record, mine: list[Record], out: Path) -> str:
    attempts = sum(one.block.repetition == last.block.repetition and one.status in FAILURES for one in mine)
    name = f"{last.cell.arm} {words.levels(last.cell.factors)}".strip()
    how = "was invalid" if last.status == "invalid" else "failed"
    ending = last_line(out / "cells" / last.cell.id / f"r{last.block.repetition}" / f"a{last.attempt}")
    return (
        f"{name} {how} in all {words.count(attempts, 'attempt')}: {last.reason}; "
        f"its output: coresident logs {out} {last.cell.id}" + (f", which ends: {ending}" if ending else "")
    )


def last_line(place: Path) -> str:
    """The last line with anything on it that an attempt's processes wrote, errors first; "" where there is none."""
    for name in ("log", "stderr", "stdout"):
        try:
            with (place / name).open("rb") as file:
                file.seek(max(0, (place / name).stat().st_size - _TAIL))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            continue
        found = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if found:
            return words.brief("".join(sign for sign in found if sign.isprintable()), _SHOWN)
    return ""
