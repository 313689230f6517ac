"""`coresident pool`: adapters on one frozen base, as a tool. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from coresident.cli.engines import checked, echo, one_device, voices
from coresident.errors import UserError

pool = typer.Typer(
    help="Train LoRA adapters that share one frozen base, and evaluate them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Base = Annotated[Path, typer.Option("--base", help="A Hugging Face directory of a causal language model.")]
Loss = Annotated[str, typer.Option("--loss", help="dpo (preferences) or sft (completions).")]
Place = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, or a GPU's UUID.")]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set a parameter (docs/pool.md).")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output, and nothing else.")]
KEPT_EVERY = 50
# The ways of sharing in which learners keep no checkpoints.
NOT_KEPT = ("trl", "smolvm")


@pool.command()
def train(
    out: Annotated[Path, typer.Option("--out", help="Where adapters and checkpoints go.")],
    base: Annotated[
        Path | None, typer.Option("--base", help="The frozen base: a Hugging Face directory.")
    ] = None,
    data: Annotated[
        list[Path], typer.Option("--data", help="JSONL files: one for all learners, or one each.")
    ] = [],  # noqa: B006 - typer copies it
    more: Annotated[list[Path] | None, typer.Argument(hidden=True)] = None,
    learners: Annotated[
        int | None, typer.Option("--learners", help="How many (default: one a file).")
    ] = None,
    loss: Annotated[str | None, typer.Option("--loss", help="dpo (preferences, the default) or sft.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Optimiser steps (default: one pass).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the training in --out.")] = False,
    device: Place = "cpu",
    sharing: Annotated[
        str | None, typer.Option("--sharing", help="fork (default), packed, mapped or none.")
    ] = None,
    eval_data: Annotated[
        list[Path], typer.Option("--eval-data", help="Held-out JSONL, one or one each.")
    ] = [],  # noqa: B006
    eval_every: Annotated[int | None, typer.Option("--eval-every", help="Also every so many steps.")] = None,
    start_from: Annotated[Path | None, typer.Option("--start-from", help="An adapter to go on from.")] = None,
    reference: Annotated[
        str | None, typer.Option("--reference", help="What DPO is held to: base, or start (--start-from).")
    ] = None,
    set_: Set = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Train N adapters over one base on one device; Ctrl-C keeps them, --resume goes on. Exits 0 if all are done."""
    from coresident.engines.pool import commands
    from coresident.engines.pool.learning import outputs
    from coresident.engines.pool.parameters import DPO

    files = [*data, *(more or [])]
    if not resume and (base is None or not files):
        missing = "--base" if base is None else "--data"
        raise UserError(
            f"pool train: {missing} is missing", f"give {missing}, or --resume with the --out to go on with"
        )
    if sharing in NOT_KEPT:
        raise UserError(
            f"--sharing {sharing} keeps no checkpoints, and a training here does",
            f"use fork, packed, mapped or none; {sharing} can be an arm of a study",
        )
    if learners is not None and learners < 1:
        raise UserError(f"--learners {learners} trains nothing", "give at least 1")
    given: dict[str, Any] = {
        "base": None if base is None else {"path": str(base.expanduser().absolute())},
        "data": {"source": "files", "files": _absolute(files)} if files else None,
        "learners": (len(files) or None) if learners is None else learners,
        "loss": loss,
        "steps": steps,
        "sharing": sharing,
        "eval_files": _absolute(eval_data) or None,
        "eval_every": eval_every,
        "start_from": None if start_from is None else str(start_from.expanduser().absolute()),
        "held_to": reference,
    }
    asked = {name: value for name, value in given.items() if value is not None}
    known = commands.saved(out).model_dump(mode="json") if resume else _defaults(asked, device)
    if start_from is not None:
        known |= outputs.described(start_from.expanduser())
    asked = {**known, **asked}
    parameters = checked(DPO, asked, set_, "pool")
    where = one_device(device)
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as stream:
        result = commands.train(parameters, out, where, resume, *voices(stream, as_json))
    if as_json:
        echo(json.dumps(result, indent=1, allow_nan=False))
    else:
        for one in result["learners"]:
            echo(_line(one, out))
    states = {one["status"] for one in result["learners"]}
    raise typer.Exit(0 if states == {"done"} else 130 if result["stopped"] else 2)


@pool.command()
def evaluate(
    base: Base,
    adapter: Annotated[Path, typer.Option("--adapter", help="A LoRA adapter as PEFT saves it.")],
    data: Annotated[Path, typer.Option("--data", help="A JSONL file that it was not trained on.")],
    loss: Loss = "dpo",
    device: Place = "cpu",
    set_: Set = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Say what an adapter does on held-out data: loss, and for preferences margins and accuracy."""
    from coresident.engines.pool import commands
    from coresident.engines.pool.learning import outputs
    from coresident.engines.pool.parameters import DPO

    asked: dict[str, Any] = {"base": {"path": str(base.expanduser().absolute())}, "loss": loss, "learners": 1}
    asked = {**_defaults(asked, device), **asked, **outputs.described(adapter)}
    found = commands.evaluate(checked(DPO, asked, set_, "pool"), adapter, data, one_device(device))
    if as_json:
        echo(json.dumps(found, indent=1, allow_nan=False))
    else:
        for name, value in found.items():
            echo(f"{name:<16}{value:.6g}")


@pool.command()
def fit(
    base: Annotated[
        Path | None, typer.Option("--base", help="The frozen base: a Hugging Face directory.")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", help="Instead of --base: a named shape, such as qwen2.5-7b.")
    ] = None,
    arm: Annotated[
        str, typer.Option("--arm", help="native (a base each), fork (one base), packed or trl.")
    ] = "fork",
    memory: Annotated[
        str, typer.Option("--device-memory", help="What the card has, such as 80GiB.")
    ] = "80GiB",
    learners: Annotated[
        str | None,
        typer.Option("--learners", help="How many, such as 8 or 4,8,16 (default: up to the limit)."),
    ] = None,
    data: Annotated[list[Path], typer.Option("--data", help="JSONL files, whose rows are looked at.")] = [],  # noqa: B006
    more: Annotated[list[Path] | None, typer.Argument(hidden=True)] = None,
    row_tokens: Annotated[
        int | None,
        typer.Option("--row-tokens", help="How long rows are, without --data (default: max_length)."),
    ] = None,
    loss: Loss = "dpo",
    set_: Set = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Say what a run would take of a card and how many learners fit, without a card. Exits 1 if what was asked does not."""
    from coresident.engines.pool import sizes
    from coresident.engines.pool.base import limits
    from coresident.engines.pool.base.base import read
    from coresident.engines.pool.fit import foretell
    from coresident.engines.pool.parameters import DPO

    counts = _counts(learners)
    if (base is None) == (config is None):
        raise UserError("pool fit: give one of --base and --config", "--base DIR, or --config qwen2.5-7b")
    files = [*data, *(more or [])]
    looked_up = bool(files) or any(change.startswith("data.") for change in set_)
    if row_tokens is not None and looked_up:
        raise UserError("pool fit: data say how long rows are, and so does --row-tokens", "leave one out")
    for name, option in {
        "learners": "--learners",
        "device_memory": "--device-memory",
        "sharing": "--arm",
    }.items():
        if any(change.partition("=")[0].strip() == name for change in set_):
            raise UserError(f"pool fit: --set {name} would be passed over", f"say {option}")
    where = {"config": config} if base is None else {"path": str(base.expanduser().absolute())}
    asked: dict[str, Any] = {"base": where, "loss": loss, "sharing": foretell.arm(arm), "dtype": "bfloat16"}
    asked |= {"learners": max(counts, default=len(files) or 1)}
    if base is not None:
        directory = read(base.expanduser().absolute())
        asked |= {"dtype": _held(directory.dtype, "cuda"), "max_length": limits.row(directory.config)}
    if files:
        asked["data"] = {"source": "files", "files": _absolute(files)}
    settings = checked(DPO, asked, set_, "pool")
    limits.check_length(settings)
    width = None if looked_up else (settings.max_length if row_tokens is None else row_tokens)
    try:
        size = sizes.parse(memory)
    except ValueError as error:
        raise UserError(f"--device-memory: {error}", "give a size such as 80GiB") from None
    found = foretell.foretell(settings, counts, size, width)
    if as_json:
        echo(json.dumps(foretell.as_json(found), indent=1, allow_nan=False))
    else:
        echo("\n".join(foretell.lines(found)))
    raise typer.Exit(1 if any(one.total > size for one in found.points if one.learners in counts) else 0)


def _counts(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if not all(1 <= count <= 1024 for count in counts):
        raise UserError(
            f"--learners {text!r} is not a number of learners", "give 1 to 1024, or several: 4,8,16"
        )
    return counts


def _held(kind: str | None, device: str) -> str:
    """The dtype in which a base of the dtype `kind` is held where it is not said: its own if learners compute in it."""
    if kind in ("float32", "bfloat16", "float64"):
        return kind
    return "float32" if device == "cpu" else "bfloat16"


def _defaults(asked: Mapping[str, Any], device: str) -> dict[str, Any]:
    """What follows from the base, the data and the machine, where it is not said."""
    from coresident.engines.pool.base import base, limits

    # A pack is one process, whose products are all its learners'.
    processes = 1 if asked.get("sharing") == "packed" else asked["learners"]
    directory = base.read(Path(asked["base"]["path"]))
    found: dict[str, Any] = {
        "dtype": _held(directory.dtype, device),
        "threads": max(1, len(os.sched_getaffinity(0)) // processes) if device == "cpu" else 1,
        "checkpoint_every": KEPT_EVERY,
        "on_failure": "continue",
        "max_length": limits.row(directory.config),
    }
    if "data" in asked:
        longest = max(_lines(Path(file)) for file in asked["data"]["files"])
        found["steps"] = max(2, -(-longest // 2))
    return found


def _lines(file: Path) -> int:
    try:
        return sum(bool(line.strip()) for line in file.read_bytes().split(b"\n"))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}", "give a readable JSONL file") from None


def _absolute(files: Sequence[Path]) -> list[str]:
    return [str(file.expanduser().absolute()) for file in files]


def _line(one: Mapping[str, Any], out: Path) -> str:
    start = f"learner {one['learner']}: {one['status']}"
    if "reason" in one:
        return f"{start}: {one['reason']}"
    said = f"{start} after {one['steps']} steps, loss {one['first_loss']:.4f} -> {one['last_loss']:.4f}"
    return f"{said}, {out / one['adapter']}" if one["adapter"] else f"{said}; go on with --resume"
