"""`coresident pretrain`: small models from text to a checkpoint. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coresident.cli_pool import _device as one_device
from coresident.cli_pool import _voices as voices
from coresident.errors import UserError

if TYPE_CHECKING:
    from coresident.workload import Parameters

pretrain = typer.Typer(
    help="Train small Llamas and Mixture-of-Experts models from scratch.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Config = Annotated[Path | None, typer.Option("--config", help="A YAML file of settings.")]
Set = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set a dotted key (docs/pretrain.md).")
]
Place = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, or a GPU's UUID.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output, and nothing else.")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="What --out of `pretrain train` was.")]


@pretrain.command()
def prepare(
    out: Annotated[Path, typer.Option("--out", help="Where the token cache goes: a new directory.")],
    config: Config = None,
    set_: Set = [],  # noqa: B006 - typer copies it
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes (default: the cores).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn text into a token cache; without settings, Python's own sources and documentation."""
    from coresident.engines.pretrain import commands
    from coresident.text.prepare import Prepare

    settings = _settings(Prepare, _read(config), set_, "pretrain prepare")
    say, _ = voices(sys.stdout, as_json)
    told = commands.prepare(settings, out, workers or len(os.sched_getaffinity(0)), say)
    _show(told, as_json)


@pretrain.command()
def train(
    out: Annotated[Path, typer.Option("--out", help="Where checkpoints and metrics go.")],
    config: Config = None,
    set_: Set = [],  # noqa: B006
    preset: Annotated[
        str | None, typer.Option("--preset", help="20m, 50m, 90m, 250m, 500m, smoke, ...")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the training in --out.")] = False,
    device: Place = "cpu",
    as_json: Json = False,
) -> None:
    """Train a model; Ctrl-C keeps its state, --resume goes on. Exits 0 if it is trained, 130 if it was stopped."""
    from coresident.engines.pretrain import commands, directory
    from coresident.engines.pretrain.parameters import Train

    asked = directory.saved(out).model_dump(mode="json") if resume else {}
    asked = _merged(asked, _read(config))
    if preset is not None:
        asked |= {"preset": preset, "shape": None}
    settings = _settings(Train, asked, set_, "pretrain train")
    result = commands.train(settings, out, one_device(device), resume, *voices(sys.stdout, as_json))
    _show(result, as_json)
    raise typer.Exit({"done": 0, "stopped": 130}.get(result["status"], 2))


@pretrain.command()
def evaluate(
    run: RunDir,
    subset: Annotated[
        int | None, typer.Option("--subset", min=1, help="At most about so many targets of it.")
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Sequences a batch.")] = None,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Another token cache than it was trained on.")
    ] = None,
    device: Place = "cpu",
    as_json: Json = False,
) -> None:
    """Say a trained model's loss on the validation split, for each family too, beside a unigram model's."""
    from coresident.engines.pretrain import commands

    _show(commands.evaluate(run, one_device(device), subset, batch, cache), as_json)


@pretrain.command()
def export(
    run: RunDir,
    out: Annotated[Path, typer.Option("--out", help="A new directory, for transformers to load.")],
    as_json: Json = False,
) -> None:
    """Write a trained model and its tokenizer as a Hugging Face directory (Llama, or OLMoE with experts)."""
    from coresident.engines.pretrain import commands

    _show(commands.export(run, out), as_json)


def _read(config: Path | None) -> dict[str, Any]:
    """A file of settings as a plain mapping; nothing without one."""
    if config is None:
        return {}
    from coresident.lab.study.source import read

    try:
        text = config.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{config} cannot be read: {error}", "give a readable YAML file") from None
    value, _ = read(text, str(config))
    if not isinstance(value, dict | None):
        raise UserError(f"{config}: not a mapping of settings", "write it as lines of `key: value`")
    return value or {}


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, mapping by mapping."""
    return below | {
        key: _merged(below[key], value)
        if isinstance(value, dict) and isinstance(below.get(key), dict)
        else value
        for key, value in above.items()
    }


def _settings(model: type[Parameters], asked: dict[str, Any], changes: Sequence[str], origin: str) -> Any:
    """Checked as a study's parameters are, with the same messages."""
    from pydantic import ValidationError

    from coresident.lab.study import overrides
    from coresident.lab.study.explain import explain
    from coresident.lab.study.source import Source

    source = Source(origin)
    overrides.apply(asked, source, changes)
    try:
        return model.model_validate_json(json.dumps(asked, allow_nan=False))
    except ValidationError as error:
        raise explain(error, model, asked, source.where) from None
    except ValueError:
        raise UserError(f"{origin}: a setting is not a finite number", "give finite numbers only") from None


def _show(told: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(told, indent=1, allow_nan=False))
        return
    for name, value in told.items():
        if isinstance(value, dict):
            for inner, one in value.items():
                typer.echo(f"{name + '.' + inner:<32}{_written(one)}")
        elif value is not None:
            typer.echo(f"{name:<32}{_written(value)}")


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {_written(one)}" for name, one in value.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)
