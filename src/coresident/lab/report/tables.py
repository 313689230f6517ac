"""One table, shown three ways: drawn on a terminal, as plain text elsewhere, as Markdown in a document."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

WIDTH = 100
NARROWEST = 40


@dataclass(frozen=True)
class Table:
    """Rows of text under `headers`; `right` are the indices of the columns that are aligned to the right.

    A cell that is exactly a key of `styles` is drawn in that style on a terminal; the word itself always
    stands there.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    right: frozenset[int] = frozenset()
    styles: Mapping[str, str] = field(default_factory=dict)


def show(table: Table, console: Console, *others: Table) -> None:
    """Draw on a terminal, write plain text anywhere else; never wider than the console or 100 columns.

    `others` hold the same another way: the first that fits is shown. If all are too wide, the first that fits
    with its first column made into headings; if they still are, each value gets a line of its own: a table
    whose cells are broken into pieces is not read but puzzled over.
    """
    width = _width(console)
    if table.title:
        say(table.title, console, style="bold")
    forms = (
        _columns(one, width, headings, ruled=console.is_terminal)
        for headings in (False, True)
        for one in (table, *others)
    )
    for line in next(filter(None, forms), None) or _stanzas(table, width):
        if console.is_terminal:
            console.print(line, width=width)
        else:
            console.file.write(line.plain.rstrip() + "\n")


def say(text: str, console: Console, style: str | None = None) -> None:
    """Print text as it is: no markup in it is interpreted, and off a terminal it is broken at its width, 100 columns at most."""
    from rich.text import Text

    width = _width(console)
    if console.is_terminal:
        console.print(Text(text, style=style or ""), width=width)
    else:
        console.file.write("\n".join(_broken(line, width) for line in text.splitlines()) + "\n")


def _width(console: Console) -> int:
    return min(WIDTH, max(console.width, NARROWEST))


def _columns(table: Table, width: int, headings: bool, ruled: bool) -> list[Text]:
    """A line a row, without the columns that no row has anything in; [] where that is wider than `width`.

    `headings`: the first column is none, but has a line of its own wherever it changes.
    """
    from rich.cells import cell_len
    from rich.text import Text

    grid = [[" ".join(cell.split()) for cell in row] for row in (table.headers, *table.rows)]
    sizes = [max(map(cell_len, column)) for column in zip(*grid, strict=True)]
    kept = [
        column
        for column in range(headings, len(sizes))
        if not table.rows or any(row[column] for row in grid[1:])
    ]
    indent = "  " if headings else ""
    room = width - len(indent) - sum(sizes[column] for column in kept)
    gaps = len(kept) - 1
    if not kept or room < gaps or (headings and sizes[0] > width):
        return []
    gap = "  " if room >= 2 * gaps else " "
    lines: list[Text] = []
    for number, row in enumerate(grid):
        head = "" if number else "bold"
        if headings and row[0] and (number < 2 or row[0] != grid[number - 1][0]):
            lines.append(Text(row[0], head))
        cells = [Text(row[column], head or table.styles.get(row[column], "")) for column in kept]
        for column, cell in zip(kept, cells, strict=True):
            cell.align("right" if column in table.right else "left", sizes[column])
        lines.append(Text(indent) + Text(gap).join(cells))
        if ruled and not number:
            lines.append(Text("─" * lines[-1].cell_len))
    return lines


def _stanzas(table: Table, width: int) -> Iterator[Text]:
    """A row's first cell, then its others, each after its column's header, or below it where headers leave them no room."""
    from rich.text import Text

    beside = max(map(len, table.headers[1:]), default=0) + 4
    longest = max((len(cell) for row in table.rows for cell in row[1:]), default=0)
    below = width - beside < min(longest, width // 2)
    for row in table.rows:
        if row[0]:
            yield Text(_broken(row[0], width))
        for header, cell in zip(table.headers[1:], row[1:], strict=True):
            if cell:
                if below:
                    yield Text(_broken(f"  {header}", width))
                start, indent = ("    ", 4) if below else (f"  {header:<{beside - 4}}  ", beside)
                text = textwrap.fill(
                    cell, width, initial_indent=start, subsequent_indent=" " * indent, break_on_hyphens=False
                )
                yield Text(text, table.styles.get(cell, ""))


def markdown(table: Table) -> str:
    """A pipe table, with its title in bold above it."""
    rule = ["---:" if column in table.right else "---" for column in range(len(table.headers))]
    lines = [f"| {' | '.join(map(escaped, row))} |" for row in (table.headers, *table.rows)]
    lines.insert(1, f"| {' | '.join(rule)} |")
    head = [f"**{escaped(table.title)}**", ""] if table.title else []
    return "\n".join([*head, *lines])


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, within a table too; an underscore inside a word needs no escape."""
    signs = r"[\\|*`<~]|(?<=\])\(|&(?=#?\w+;)|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"
    text = re.sub(signs, lambda sign: f"\\{sign.group()}", text)
    return " ".join(text.split())


def _broken(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    return textwrap.fill(line, width, subsequent_indent="    ", break_on_hyphens=False)
