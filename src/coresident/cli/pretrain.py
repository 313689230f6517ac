"""`coresident pretrain`: small models from text to a checkpoint. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from coresident.cli.engines import checked, merged, one_device, read, show, voices
from coresident.errors import interruptible

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

    settings = checked(Prepare, read(config), set_, "pretrain prepare")
    say, _ = voices(sys.stdout, as_json)
    with interruptible(lambda: f"nothing of {out} is kept: repeat the command, which begins anew"):
        told = commands.prepare(settings, out, workers or len(os.sched_getaffinity(0)), say)
    show(told, as_json)


@pretrain.command()
def train(
    out: Annotated[Path, typer.Option("--out", help="Where checkpoints and metrics go.")],
    config: Config = None,
    set_: Set = [],  # noqa: B006
    preset: Annotated[
        str | None,
        typer.Option("--preset", help="20m, 50m, 90m, 250m, 500m, smoke (default), moe-smoke, moe-64."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the training in --out.")] = False,
    device: Place = "cpu",
    as_json: Json = False,
) -> None:
    """Train a model; Ctrl-C keeps its state, --resume goes on. Exits 0 if it is trained, 130 if it was stopped."""
    from coresident.engines.pretrain import commands, directory
    from coresident.engines.pretrain.parameters import Train

    asked = directory.saved(out).model_dump(mode="json") if resume else {}
    asked = merged(asked, read(config))
    if preset is not None:
        asked |= {"preset": preset, "shape": None}
    settings = checked(Train, asked, set_, "pretrain train")
    where = one_device(device)
    result = commands.train(settings, out, where, resume, *voices(sys.stdout, as_json), _free(where))
    show(result, as_json)
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

    where = one_device(device)
    show(commands.evaluate(run, where, subset, batch, cache, _free(where)), as_json)


@pretrain.command()
def export(
    run: RunDir,
    out: Annotated[Path, typer.Option("--out", help="A new directory, for transformers to load.")],
    as_json: Json = False,
) -> None:
    """Write a trained model and its tokenizer as a Hugging Face directory (Llama, or OLMoE with experts)."""
    from coresident.engines.pretrain import commands

    show(commands.export(run, out), as_json)


def _free(device: str) -> int | None:
    """Bytes of memory that this process can have; None on a card, where running out is said by PyTorch."""
    from coresident import available

    return available.memory() if device == "cpu" else None
