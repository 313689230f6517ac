"""One table three ways: nothing is lost, nothing is interpreted, nothing needs more than 100 columns."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from coresident.lab.report import tables
from coresident.lab.report.tables import Table

TABLE = Table(("name", "n"), [("a", "1"), ("[bold]b[/bold]", "23")], title="A title", right=frozenset({1}))


def shown(table: Table, terminal: bool, width: int = 100) -> str:
    stream = io.StringIO()
    tables.show(table, Console(file=stream, width=width, force_terminal=terminal))
    return stream.getvalue()


def test_off_a_terminal_a_table_is_plain_aligned_text() -> None:
    assert (
        shown(TABLE, terminal=False)
        == "A title\nname             n\na                1\n[bold]b[/bold]  23\n"
    )


def test_on_a_terminal_it_has_a_line_and_colours_but_the_same_words() -> None:
    table = Table(("state",), [("refuted",)], styles={"refuted": "bold red"})
    drawn = shown(table, terminal=True)
    assert "refuted" in drawn and "\x1b[1;31m" in drawn and "─" in drawn
    assert "\x1b" not in shown(table, terminal=False)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [40, 100, 200])
def test_no_line_is_wider_than_100_columns_and_long_cells_are_folded_not_cut(
    terminal: bool, width: int
) -> None:
    long = "x" * 70 + " " + "y" * 70
    table = Table(("one", "two"), [(long, long)])
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    tables.show(table, console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("x") == 140 and text.count("y") == 140


def test_markdown_keeps_bars_and_stars_as_they_are() -> None:
    table = Table(
        ("a|b", "n"), [("*x* <b>", "1\n2"), ("peak_memory_mib _y_", "3")], title="T", right=frozenset({1})
    )
    assert tables.markdown(table).splitlines() == [
        "**T**",
        "",
        "| a\\|b | n |",
        "| --- | ---: |",
        "| \\*x\\* \\<b> | 1 2 |",
        "| peak_memory_mib \\_y\\_ | 3 |",
    ]


def test_markdown_makes_no_link_no_struck_text_and_no_entity() -> None:
    shown = tables.escaped("[a](b) ~~c~~ &lt; R&D [1, 2] (3)")
    assert shown == "[a]\\(b) \\~\\~c\\~\\~ \\&lt; R&D [1, 2] (3)"


def test_text_is_broken_at_100_columns_off_a_terminal() -> None:
    stream = io.StringIO()
    tables.say("word " * 40 + "[red]end[/red]", Console(file=stream, width=200, force_terminal=False))
    lines = stream.getvalue().splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 100
    assert lines[-1].endswith("[red]end[/red]")


FINDINGS = Table(
    ("hypothesis", "at", "98 % interval", "expected", "state"),
    [
        ("H1 (post hoc)", "learners=8", "0.9981 [0.9912, 1.0051]", "", "supported"),
        ("H1 (post hoc)", "learners=16", "1.0", "", "refuted"),
        ("H2", "learners=8", "1.0", "", "refuted"),
    ],
)


def test_a_space_fewer_is_between_columns_where_that_makes_them_fit() -> None:
    roomy = "H1 (post hoc)  learners=8   0.9981 [0.9912, 1.0051]  supported"
    assert roomy in shown(FINDINGS, terminal=False, width=len(roomy))
    tight = "H1 (post hoc) learners=8  0.9981 [0.9912, 1.0051] supported"
    assert tight in shown(FINDINGS, terminal=False, width=len(tight))


def test_where_columns_do_not_fit_first_cells_are_headings() -> None:
    assert shown(FINDINGS, terminal=False, width=55).splitlines() == [
        "hypothesis",
        "  at           98 % interval            state",
        "H1 (post hoc)",
        "  learners=8   0.9981 [0.9912, 1.0051]  supported",
        "  learners=16  1.0                      refuted",
        "H2",
        "  learners=8   1.0                      refuted",
    ]


def test_of_two_forms_the_first_that_fits_is_shown() -> None:
    long, short = Table(("a",), [("x" * 60,)]), Table(("b",), [("y",)])
    stream = io.StringIO()
    for width in (80, 50):
        tables.show(long, Console(file=stream, width=width, force_terminal=False), short)
    assert stream.getvalue() == f"a\n{'x' * 60}\nb\ny\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_where_that_does_not_fit_each_value_has_a_line_and_no_cell_is_broken(terminal: bool) -> None:
    assert shown(FINDINGS, terminal, width=45).splitlines() == [
        line
        for name, at, interval, _, state in FINDINGS.rows
        for line in (
            name,
            f"  at             {at}",
            f"  98 % interval  {interval}",
            f"  state          {state}",
        )
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_below_a_header_that_leaves_no_room_beside_it_a_cell_is_whole(terminal: bool) -> None:
    arm = "a" * 64
    lines = shown(Table(("metric", "at", arm), [("speed", "n=1", "812 [798–824]")]), terminal, width=40)
    assert lines.splitlines() == [
        "speed",
        "  at",
        "    n=1",
        f"  {arm[:38]}",
        f"    {arm[38:]}",
        "    812 [798–824]",
    ]


def test_a_column_of_nothing_is_left_out_and_a_table_of_no_rows_keeps_its_headers() -> None:
    assert shown(Table(("a", "b", "c"), [("1", "", "2")]), terminal=False) == "a  c\n1  2\n"
    assert shown(Table(("a", "b", "c"), []), terminal=False) == "a  b  c\n"


def test_text_is_broken_at_a_narrower_console_s_width() -> None:
    stream = io.StringIO()
    tables.say("word " * 40, Console(file=stream, width=60, force_terminal=False))
    assert 50 < max(map(len, stream.getvalue().splitlines())) <= 60
