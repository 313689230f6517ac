"""One table, shown three ways: drawn on a terminal, as plain text elsewhere, as Markdown in a document."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

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


def show(table: Table, console: Console) -> None:
    """Draw on a terminal, write plain text anywhere else; never wider than the console or 100 columns.

    Where the columns do not fit beside each other, each value gets a line of its own: a table whose cells
    are broken into pieces is not read but puzzled over.
    """
    from rich.text import Text

    width = _width(console)
    if table.title:
        say(table.title, console, style="bold")
    if _needed(table, lines=console.is_terminal) > width:
        for text, style in _stanzas(table, width):
            if console.is_terminal:
                console.print(Text(text, style=style), width=width)
            else:
                console.file.write(text + "\n")
    elif console.is_terminal:
        console.print(_drawn(table, lines=True), width=width)
    else:
        console.file.write(_plain(table, width) + "\n")


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


def _needed(table: Table, lines: bool) -> int:
    """The width at which no cell need be broken."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=10_000)
    return console.measure(_drawn(table, lines)).maximum


def _stanzas(table: Table, width: int) -> Iterator[tuple[str, str]]:
    """(line, its style): a row's first cell, then its others, each after its column's header."""
    beside = max(map(len, table.headers[1:]), default=0) + 4
    for row in table.rows:
        if row[0]:
            yield _broken(row[0], width), ""
        for header, cell in zip(table.headers[1:], row[1:], strict=True):
            if cell:
                start = f"  {header:<{beside - 4}}  "
                text = textwrap.fill(
                    cell, width, initial_indent=start, subsequent_indent=" " * beside, break_on_hyphens=False
                )
                yield text, table.styles.get(cell, "")


def _plain(table: Table, width: int) -> str:
    """Columns of text without lines or colours, no trailing spaces."""
    from rich.console import Console

    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False).print(
        _drawn(table, lines=False)
    )
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def markdown(table: Table) -> str:
    """A pipe table, with its title in bold above it."""
    rule = ["---:" if column in table.right else "---" for column in range(len(table.headers))]
    lines = [f"| {' | '.join(map(escaped, row))} |" for row in (table.headers, *table.rows)]
    lines.insert(1, f"| {' | '.join(rule)} |")
    head = [f"**{escaped(table.title)}**", ""] if table.title else []
    return "\n".join([*head, *lines])


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, within a table too; an underscore inside a word needs no escape."""
    text = re.sub(r"[\\|*`<]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", lambda sign: f"\\{sign.group()}", text)
    return " ".join(text.split())


def _drawn(table: Table, lines: bool) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(
        box=box.SIMPLE_HEAD if lines else None,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1),
        collapse_padding=True,
    )
    for column, header in enumerate(table.headers):
        drawn.add_column(Text(header), justify="right" if column in table.right else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell, style=table.styles.get(cell, "")) for cell in row))
    return drawn


def _broken(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    return textwrap.fill(line, width, subsequent_indent="    ", break_on_hyphens=False)
