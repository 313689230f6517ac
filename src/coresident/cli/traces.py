"""`coresident moe trace | simulate | fit-predictor`: routing recorded, simulated over, and predicted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from coresident.cli.engines import checked, merged, one_device, voices
from coresident.cli.engines import read as read_config
from coresident.errors import UserError

traces = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Config = Annotated[Path | None, typer.Option("--config", help="A YAML file of settings.")]
Set = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set a dotted key (docs/moe-traces.md).")
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output, and nothing else.")]
Kept = Annotated[Path, typer.Argument(metavar="TRACES", help="What --out of `moe trace` was.")]


@traces.command()
def trace(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face directory.")],
    out: Annotated[Path, typer.Option("--out", help="A new directory for the traces.")],
    prompts: Annotated[
        str, typer.Option("--prompts", help="A JSONL file of `prompt` and `family`, or built-in.")
    ] = "built-in",
    each: Annotated[
        int, typer.Option("--each", min=1, help="Built-in prompts of each of the six families, at most.")
    ] = 11,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=2, help="Tokens generated after each prompt (256).")
    ] = None,
    config: Config = None,
    set_: Set = [],  # noqa: B006 - typer copies it
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, or a GPU's UUID.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Record which experts a model chooses while it goes on from prompts, checked and split into fit and held-out."""
    from coresident.engines.moe.traces import builtin, collect, told
    from coresident.engines.moe.traces.prompts import read

    asked = merged(read_config(config), {} if max_tokens is None else {"max_tokens": max_tokens})
    settings = checked(collect.Tracing, asked, set_, "moe trace")
    say, _ = voices(sys.stdout, as_json)
    given = builtin.prompts(each, say=say) if prompts == "built-in" else read(Path(prompts))
    found = collect.trace(model, given, settings, out, one_device(device), say)
    _show(told.summary(found), as_json)


@traces.command()
def simulate(
    kept: Kept,
    capacity: Annotated[
        str | None, typer.Option("--capacity", help="Slots a layer, such as 16 or 16,32,48 (one row each).")
    ] = None,
    policy: Annotated[
        str, typer.Option("--policy", help="lru, lfu, lfu-decay, static, belady; several with commas.")
    ] = "lru",
    predictor: Annotated[
        str, typer.Option("--predictor", help="none or a kind (`moe fit-predictor`); several with commas.")
    ] = "none",
    width: Annotated[
        int | None, typer.Option("--width", min=1, help="Experts fetched ahead a layer (k).")
    ] = None,
    depth: Annotated[int | None, typer.Option("--depth", min=1, help="Layers ahead (1).")] = None,
    config: Config = None,
    set_: Set = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Say what a policy, a capacity and a predictor would do on recorded routing, beside demand, Belady and an oracle."""
    from coresident.engines.moe.simulate import simulation, told
    from coresident.engines.moe.simulate.parameters import Simulate
    from coresident.engines.moe.traces.files import read

    base = merged(read_config(config), {"traces": str(kept)})
    base |= {name: value for name, value in (("width", width), ("depth", depth)) if value is not None}
    whole = read(kept)
    rows: list[dict[str, Any]] = []
    if capacity is None and "capacity" not in base and not any(one.startswith("capacity=") for one in set_):
        raise UserError("no number of slots is given", "give --capacity, such as 16 or 16,32,48")
    sizes = [{}] if capacity is None else [{"capacity": slots} for slots in _numbers(capacity)]
    for size in sizes:
        for rule in policy.split(","):
            for kind in predictor.split(","):
                named = {**size, "policy": rule, "predictor": None if kind == "none" else kind}
                settings = checked(Simulate, base | named, set_, "moe simulate")
                rows += told.rows(settings, simulation.simulate(whole, settings), last=rows)
    if as_json:
        typer.echo(json.dumps(rows, indent=1, allow_nan=False))
    else:
        typer.echo(told.table(rows))


@traces.command(name="fit-predictor")
def fit_predictor(
    kept: Kept,
    kind: Annotated[str, typer.Option("--kind", help="Which predictors, with commas, or all.")] = "all",
    depth: Annotated[str, typer.Option("--depth", help="Layers ahead, such as 1 or 1,2,3.")] = "1",
    width: Annotated[
        int | None, typer.Option("--width", min=1, help="m of recall@m (default: the model's k).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="A new directory: keeps each as KIND-DEPTH in it.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the predictor chance.")] = 0,
    as_json: Json = False,
) -> None:
    """Fit predictors on the fit prompts; say recall@m and precision on the held-out ones, by family."""
    from coresident.engines.moe.predictors import command

    found = command.fitted(kept, kind.split(","), _numbers(depth), width, out, seed)
    if as_json:
        typer.echo(json.dumps(found, indent=1, allow_nan=False))
    else:
        typer.echo(command.table(found))


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise UserError(f"{text!r} is no list of numbers above 0", "give one, or several: 16,32,48")
    return found


def _show(told: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(told, indent=1, allow_nan=False))
        return
    for name, value in told.items():
        shown = ", ".join(f"{key} {one}" for key, one in value.items()) if isinstance(value, dict) else value
        typer.echo(f"{name:<20}{f'{shown:.4g}' if isinstance(shown, float) else shown}")
