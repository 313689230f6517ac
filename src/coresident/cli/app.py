"""The command line: all commands, and what holds for each. Nothing heavy is imported before a command needs it, so that
`--help` answers at once.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from coresident import __version__
from coresident.cli.lab import lab
from coresident.cli.moe import moe
from coresident.cli.pool import pool
from coresident.cli.pretrain import pretrain
from coresident.errors import CoresidentError, UserError

# Usage errors, which typer prints itself; which module they live in depends on typer's version.
_ClickError: type[Exception] = typer.BadParameter.__mro__[2]


class _Group(TyperGroup):
    """All commands, with what holds for each: `--debug` wherever it stands, and errors as statuses.

    Errors are caught here, inside typer, since typer would turn a reader who left (`| head`) into status 1: "refuted".
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Bring `--debug` to the front."""
        ours = args[: args.index("--")] if "--" in args else args
        if "--debug" in ours:
            args = ["--debug", *(word for word in ours if word != "--debug"), *args[len(ours) :]]
        return list(super().parse_args(ctx, args))

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with statuses(debug=bool(ctx.params.get("debug"))):
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Group,
    help="Put more models on one accelerator, and prove it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.add_typer(lab)
app.add_typer(pool, name="pool")
app.add_typer(pretrain, name="pretrain")
app.add_typer(moe, name="moe")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"coresident {__version__}")
        raise typer.Exit


@app.callback()
def everywhere(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Put more models on one accelerator, and prove it."""


@contextmanager
def statuses(debug: bool) -> Iterator[None]:
    """Every error becomes one sentence and its remedy on standard error, and its family's exit status."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except CoresidentError as error:
        if debug:
            traceback.print_exc()
        _complain(error.problem, error.remedy)
        sys.exit(error.status)
    except KeyboardInterrupt as interrupt:
        _complain("interrupted", str(interrupt) or "repeat the command")
        sys.exit(130)
    except BrokenPipeError:
        # Python flushes standard output once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (typer.Exit, typer.Abort, _ClickError):
        raise
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            _bug(error, debug)
        _complain(f"{error.filename!s:.60}... is too long for the name of a file", "give a shorter one")
        sys.exit(UserError.status)
    except Exception as error:  # noqa: BLE001 - the last resort: a bug is told as one
        _bug(error, debug)


def _bug(error: Exception, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    _complain(
        f"{type(error).__name__}: {error}",
        "this is a bug in coresident: please report it with the traceback (coresident --debug ...)",
    )
    sys.exit(70)


def _complain(problem: str, remedy: str) -> None:
    typer.echo(f"coresident: {problem}\n  -> {remedy}", err=True)


def main() -> None:
    """The `coresident` command."""
    app(prog_name="coresident")
