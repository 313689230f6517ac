"""The commands of the lab: studies, runs and what is made of their records."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from coresident.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from coresident.lab.records.store import Stored
    from coresident.lab.verdict.model import Verdict

lab = typer.Typer()


def _home(given: Path) -> Path:
    """The run directory that is meant, also where its folder of records is named."""
    inner = given.name == "records" and not (given / "records").is_dir()
    return given.parent if inner and (given.parent / "plan.json").is_file() else given


Run = Annotated[Path, typer.Argument(help="A run directory.", callback=_home)]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output, and nothing else.")]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a dotted key.")]
Out = Annotated[Path | None, typer.Option("--out", help="Where to write (default: runs/NAME).")]
Devices = Annotated[str, typer.Option("--devices", help="cpu, or GPUs: 0 or 0,1 or UUIDs.")]
Budget = Annotated[
    float | None, typer.Option("--budget-minutes", help="Stop at the first block's edge after so many.")
]


@lab.command()
def run(
    study: Annotated[str, typer.Argument(help="A study file, or the name of a shipped study.")],
    set_: Set = [],  # noqa: B006 - typer copies it
    devices: Devices = "cpu",
    budget_minutes: Budget = None,
    out: Out = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run; write nothing.")] = False,
    retry: Annotated[
        bool, typer.Option("--retry", help="Run oom, nonfinite and timeout outcomes again.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure a study; repeat the command to resume. Exits 0 if every claim is supported, 1 if one is refuted, 3
    undecided or pending, 4 invalid.
    """
    from coresident.lab.study.load import load

    if budget_minutes is not None and not budget_minutes > 0:
        raise UserError(
            f"--budget-minutes {budget_minutes:g} is no time", "give minutes above 0, or leave it out"
        )
    loaded = load(study, set_)
    place = out or Path("runs") / loaded.study.study
    if dry_run:
        from coresident.lab.report.dry_run import as_rows, describe

        rows = as_rows(loaded, place, devices)
        _say(rows if as_json else describe(rows))
        return
    _measure(loaded, place, devices, budget_minutes, retry, as_json)


@lab.command(name="try", context_settings={"ignore_unknown_options": False})
def try_(
    commands: Annotated[list[str], typer.Argument(help="Two commands, each quoted as one word.")],
    metric: Annotated[str, typer.Option(help="What to compare.")] = "wall_seconds",
    repetitions: Annotated[int, typer.Option(help="Blocks at least; up to four times as many.")] = 5,
    half_width: Annotated[float, typer.Option(help="Stop when the ratio is known this closely.")] = 0.02,
    out: Annotated[
        Path | None, typer.Option("--out", help="Where to write, or to go on (default: a new runs/try-TIME).")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run again what failed (with --out).")] = False,
    as_json: Json = False,
) -> None:
    """Compare two commands without a study file: `coresident try -- 'COMMAND A' 'COMMAND B'`."""
    from coresident.lab.report.trial_text import sentence
    from coresident.lab.study.trial import trial

    compared = trial(commands, metric, repetitions, half_width)
    _measure(compared, out, "cpu", None, retry, as_json, lambda verdict: sentence(verdict, metric))


@lab.command()
def init(
    name: Annotated[str, typer.Argument(help="The new study's name; writes NAME.yaml here.")],
) -> None:
    """Write a commented study to start from."""
    from coresident.lab.records.files import Disk
    from coresident.lab.study.library import study_name, template

    path = Path(f"{study_name(name)}.yaml")
    text = template(name)
    try:
        Disk().publish(path, text.encode())
    except FileExistsError:
        raise UserError(f"{path} exists already", "choose another name; nothing was changed") from None
    typer.echo(f"wrote {path}; check it by: coresident run {path} --dry-run")


@lab.command()
def studies(as_json: Json = False) -> None:
    """List the studies that come with coresident."""
    from coresident.lab.study.library import shipped
    from coresident.lab.study.load import load

    found = {name: load(path).study for name, path in shipped().items()}
    if as_json:
        _say(
            [
                {"study": name, "workload": one.workload, "device": one.device, "question": one.question}
                for name, one in found.items()
            ]
        )
        return
    width = max(map(len, found), default=0)
    for name, one in found.items():
        typer.echo(f"{name:<{width}}  {'a card' if one.device == 'card' else '':<6}  {one.question}")


@lab.command()
def show(
    run: Run,
    cell: Annotated[str | None, typer.Argument(help="A cell, or the start of its name.")] = None,
    view: Annotated[
        str | None,
        typer.Option("--view", help="What an engine shows of it, such as nonfinite, losses, memory."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List a run's cells, or show every record of one of them in full; or an engine's view of them."""
    from coresident.lab.report import overview

    stored = _stored(run)
    chosen = stored if cell is None else overview.of_cell(stored, cell)
    if view is not None:
        _view(view, run, chosen, as_json)
    elif as_json:
        _say([{**one.record.model_dump(), "retracted": one.retraction is not None} for one in chosen])
    elif not chosen:
        typer.echo(f"no records in {run}")
    elif cell is None:
        overview.cells(chosen, _console(), run, _claimed(run))
    else:
        overview.show(chosen, _console())


def _claimed(run: Path) -> list[str]:
    """The metrics that a run's study makes claims about; none where there is no study that can be read."""
    from coresident.lab.study.load import load

    try:
        study = load(run / "study.yaml").study
    except UserError:
        return []
    return [claim.metric for claim in study.hypotheses.values() if claim.metric]


def _view(name: str, run: Path, chosen: list[Stored], as_json: bool) -> None:
    from coresident import views
    from coresident.lab.report import viewed

    view = views.view(name)
    rows = viewed.data(view, run, chosen)
    if as_json:
        _say(rows)
    else:
        viewed.terminal(view, rows, _console())


@lab.command(name="import")
def import_(
    what: Annotated[str, typer.Argument(help="Whose results: smolvm.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the result files are.")],
    out: Annotated[Path, typer.Option("--out", help="The run directory to make.")],
    as_json: Json = False,
) -> None:
    """Make a run directory of results that others published; `status` says what to believe of them."""
    from coresident.importing import importer
    from coresident.lab.records.imported import bring
    from coresident.lab.report import overview

    brought = bring(importer(what), directory, out)
    stored = _stored(out)
    if as_json:
        _say(overview.rows(stored))
        return
    overview.status(stored, _console())
    typer.echo(f"{len(brought)} results imported into {out}")


@lab.command()
def logs(
    run: Run,
    cell: Annotated[str, typer.Argument(help="A cell, or the start of its name.")],
    attempt: Annotated[str | None, typer.Option(help="A record's name; the newest by default.")] = None,
) -> None:
    """Print what a cell's processes wrote."""
    from coresident.lab.records.store import meant
    from coresident.lab.report import overview

    found = {one.record.id: one.record for one in overview.of_cell(_stored(run), cell)}
    if attempt is not None and attempt not in found:
        raise UserError(f"cell {cell!r} of {run} has no record {attempt!r}", meant(attempt, found, run))
    record = found[attempt] if attempt is not None else max(found.values(), key=lambda one: one.started)
    place = run / "cells" / record.cell.id / f"r{record.block.repetition}" / f"a{record.attempt}"
    logs = [path for name in ("log", "stdout", "stderr") if (path := place / name).is_file()]
    if not logs:
        raise UserError(
            f"{place} holds no logs of {record.id}", "they stay where it was measured; records go without"
        )
    for path in logs:
        typer.echo(f"--- {path}")
        typer.echo(path.read_text(encoding="utf-8", errors="replace"), nl=False)


@lab.command()
def records(
    run: Run,
    csv: Annotated[bool, typer.Option("--csv", help="One line a record and metric, as CSV.")] = False,
    as_json: Json = False,
) -> None:
    """List a run's records, one line a record and metric."""
    from coresident.lab.records import query

    _one_form(csv=csv, json=as_json)
    if csv:
        query.write_csv(run, sys.stdout)
        return
    table = query.records(run)
    if as_json:
        _say(json.loads(table.to_json(orient="records", double_precision=15)))
    elif table.empty:
        typer.echo(f"no records in {run}")
    else:
        columns = ["record", "status", "metric", "value", "unit"]
        typer.echo(table[columns].to_string(index=False, na_rep="-"))


@lab.command()
def retract(
    run: Run,
    record: Annotated[str, typer.Argument(help="The record's name.")],
    why: Annotated[str, typer.Option("--why", help="The reason, kept for good.")],
) -> None:
    """Take a record out of every aggregate; it stays visible."""
    import datetime

    from coresident.lab.records.store import Store

    _stored(run)
    Store(run).retract(record, why, datetime.datetime.now(datetime.UTC).date().isoformat())
    typer.echo(f"{record} is retracted: {why}")


@lab.command()
def status(run: Run, as_json: Json = False) -> None:
    """Say what a run holds: outcomes, controls, what is retracted."""
    from coresident.lab.report import overview

    stored = _stored(run)
    if as_json:
        _say(overview.rows(stored))
    elif not stored:
        typer.echo(f"no records in {run}")
    else:
        overview.status(stored, _console())


@lab.command()
def verdict(
    run: Run,
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown tables.")] = False,
    all_: Annotated[
        bool, typer.Option("--all", help="With every metric, not only those that claims are about.")
    ] = False,
) -> None:
    """Say what a run's records mean. Exits 0 supported, 1 refuted, 3 undecided, pending or not at its end, 4 invalid."""
    _one_form(json=as_json, markdown=markdown)
    _end(run, as_json, markdown, all_)


@lab.command()
def doctor(as_json: Json = False) -> None:
    """Say whether this machine is fit to measure on, and what to do where it is not."""
    from coresident.lab.run.doctor.findings import findings

    found = findings()
    if as_json:
        _say([{"level": one.level, "what": one.what, "remedy": one.remedy} for one in found])
    else:
        for one in found:
            typer.echo(f"{one.level:<5} {one.what}" + (f"\n      {one.remedy}" if one.remedy else ""))
    if any(one.level == "bad" for one in found):
        raise typer.Exit(2)


def _measure(
    loaded: Any,
    out: Path | None,
    devices: str,
    budget: float | None,
    retry: bool,
    as_json: bool,
    closing: Callable[[Verdict], str] | None = None,
) -> NoReturn:
    """Measure, print the verdict and exit with its status; without `out` in a new directory."""
    from coresident.lab.records.store import Store
    from coresident.lab.report.progress import Progress
    from coresident.lab.run.campaign import Options, read_plan
    from coresident.lab.run.campaign import run as measure
    from coresident.lab.run.prepare import prepare
    from coresident.lab.study.trial import fresh_directory

    begun = out is not None and read_plan(out) is not None
    prepared = prepare(loaded, devices, Store(out).records() if out and begun else [])
    place = out or fresh_directory(Path("runs"))
    finished = measure(prepared, Options(place, devices, budget, retry), Progress(_console(err=as_json)))
    if finished.stopped:
        where = "" if out is not None else f" (and --out {place})"
        typer.echo(f"{finished.stopped}; {finished.remedy}{where}", err=True)
    _end(place, as_json, False, False, finished.stopped, closing)


def _end(
    run: Path,
    as_json: bool,
    markdown: bool,
    everything: bool,
    stopped: str = "",
    closing: Callable[[Verdict], str] | None = None,
) -> NoReturn:
    """Print a run's verdict, and what `closing` makes of it, and exit with its status."""
    from coresident.lab.report import medians, verdict_text
    from coresident.lab.verdict.judge import exit_status

    judged, table = _judged(run, everything)
    judged = replace(judged, stopped=stopped)
    if as_json:
        typer.echo(verdict_text.as_json(judged))
    elif markdown:
        typer.echo(verdict_text.markdown(judged))
        typer.echo(medians.markdown(table, run))
    else:
        console = _console()
        medians.terminal(table, console, run)
        verdict_text.terminal(judged, console)
        console.print(f"records: {run / 'records'}", markup=False, highlight=False, soft_wrap=True)
        if closing is not None:
            console.print(closing(judged), markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(exit_status(judged))


def _judged(run: Path, everything: bool) -> tuple[Verdict, Any]:
    """A run's verdict, and the medians of what its claims are about, or of `everything`."""
    from coresident.lab.report import medians
    from coresident.lab.run.campaign import read_plan
    from coresident.lab.run.prepare import expanded
    from coresident.lab.study.load import load
    from coresident.lab.verdict.judge import judge

    stored = _stored(run)
    if stored and not any((run / name).exists() for name in ("study.yaml", "plan.json")):
        raise UserError(
            f"{run} has records and no study.yaml, so nothing is claimed of them",
            "see `coresident status` and `records`; a verdict is on a run of a study",
        )
    loaded = load(run / "study.yaml")
    chosen, cells = expanded(loaded, [one.record for one in stored])
    plan = read_plan(run)
    post_hoc = plan.post_hoc if plan else frozenset()
    active = [one.record for one in stored if one.retraction is None]
    retracted = [(one.record, one.retraction) for one in stored if one.retraction is not None]
    judged = judge(loaded.study, cells, active, post_hoc, retracted)
    claimed = {one.metric for one in loaded.study.hypotheses.values() if one.metric and not everything}
    return judged, medians.table(chosen, cells, active, claimed)


def _one_form(**asked: bool) -> None:
    given = [f"--{name}" for name, wanted in asked.items() if wanted]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} exclude each other", "give one of them")


def _stored(run: Path) -> list[Stored]:
    from coresident.lab.records.store import Store

    if not (run / "records").is_dir():
        raise UserError(
            f"{run} is no run directory (it has no records folder)", "name what --out was, such as runs/demo"
        )
    # Records are trees: looking for cycles among thousands of them takes as long as reading them. The command ends soon.
    gc.disable()
    return Store(run).load()


def _console(err: bool = False) -> Console:
    from rich.console import Console

    class Ours(Console):
        def on_broken_pipe(self) -> None:
            # Rich would exit with 1.
            raise BrokenPipeError

    console = Ours(stderr=err)
    # Nobody can ask a file for its width; who wants another than ours says so.
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 110
    return console


def _say(value: Any) -> None:
    typer.echo(value if isinstance(value, str) else json.dumps(value, indent=1, allow_nan=False))
