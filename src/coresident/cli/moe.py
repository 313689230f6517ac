"""`coresident moe`: decoding Mixture-of-Experts models within a memory budget. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from coresident.cli.engines import checked, one_device, show
from coresident.cli.traces import traces
from coresident.errors import UserError

moe = typer.Typer(
    help="Decode Mixture-of-Experts models of which only some experts are resident.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

# trace, simulate and fit-predictor.
moe.add_typer(traces)

ModelDir = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A Hugging Face directory (OLMoE, Qwen3-MoE).")
]
Place = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, or a GPU's UUID.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output, and nothing else.")]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set a parameter (docs/moe.md).")]


@moe.command()
def layout(
    model: ModelDir,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file of records to write, or to check.")],
    bits: Annotated[
        int | None, typer.Option("--bits", help="4: groups of 64 with scales (default: as stored).")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare what is there with its checksums.")] = False,
    as_json: Json = False,
) -> None:
    """Write each expert as one record that one read brings in; the same command goes on after an interrupt."""
    from coresident.engines.moe import commands

    if bits not in (None, 4):
        raise UserError(f"--bits {bits} is not kept", "give 4, or leave it out to keep weights as stored")
    shown = sys.stderr.isatty() and not as_json

    def progress(done: int, total: int) -> None:
        if shown:
            sys.stderr.write(f"\r\x1b[K{done} of {total} records" + ("\n" if done == total else ""))

    if check:
        told = commands.check(model.expanduser(), out.expanduser(), progress)
    else:
        kind: Literal["stored", "q4"] = "q4" if bits == 4 else "stored"
        told = commands.layout(model.expanduser(), out.expanduser(), kind, progress)
    show(told, as_json)


@moe.command()
def generate(
    model: ModelDir,
    prompt: Annotated[list[str], typer.Option("--prompt", help="What to go on from; several make a batch.")],
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Tokens at most (default: 128, or what fits).")
    ] = None,
    slots: Annotated[
        int | None, typer.Option("--slots", min=1, help="Resident experts a layer (default: all).")
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option("--device-memory", help="Instead of --slots: all in all, such as 6GiB.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="lru (default), lfu, lfu-decay, static.")
    ] = None,
    tier: Annotated[
        str | None,
        typer.Option("--tier", help="Where others are: pinned memory (default), disk, page-cache."),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", help="With --tier disk: keep so much of them in memory.")
    ] = None,
    layout: Annotated[Path | None, typer.Option("--layout", help="A file of `moe layout`.")] = None,
    bits: Annotated[
        int | None, typer.Option("--bits", help="4: experts in 4-bit (default: as stored).")
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0 takes the likeliest.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Draw among so many (0: all).")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw among the likeliest that hold so much.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the draws.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message.")] = False,
    stop: Annotated[
        list[str], typer.Option("--stop", help="A token that ends the text, besides the model's own.")
    ] = [],  # noqa: B006 - typer copies it
    device: Place = "cpu",
    set_: Set = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Generate text; prints it as it comes, then what it cost."""
    from coresident.engines.moe import commands
    from coresident.engines.moe.decoder.sampling import Sampling
    from coresident.engines.moe.parameters import MEASURING, Decode

    asked: dict[str, Any] = {
        "model": {"path": str(model.expanduser().absolute())},
        "encoding": _encoding(bits, layout),
        "verify": True,
    }
    given = {
        "slots": slots,
        "device_memory": device_memory,
        "policy": policy,
        "tier": tier,
        "read_path": None if tier is None else "record-parallel",
        "host_memory": host_memory,
        "layout": None if layout is None else str(layout.expanduser().absolute()),
    }
    asked |= {name: value for name, value in given.items() if value is not None}
    drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    sampling = checked(Sampling, drawn, (), "moe generate")
    settings = checked(Decode, asked, set_, "moe generate")
    if measured := sorted(settings.model_fields_set & MEASURING):
        raise UserError(
            f"moe generate: {measured[0]} is a parameter of measuring (the workload moe.decode), and has no effect here",
            "leave it out; --prompt, --max-tokens and --temperature say what is generated",
        )
    alone = len(prompt) == 1 and not as_json

    def shown(_: int, piece: str) -> None:
        if alone:
            sys.stdout.write(piece)
            sys.stdout.flush()

    def say(line: str) -> None:
        if not as_json:
            typer.echo(line, err=True)

    told = commands.generate(
        settings,
        commands.Asked(tuple(prompt), max_tokens, chat, tuple(stop), sampling),
        one_device(device),
        shown,
        say,
    )
    if as_json:
        typer.echo(json.dumps(told, indent=1, allow_nan=False))
        return
    if alone:
        typer.echo()
    else:
        for text in told["text"]:
            typer.echo(f"--- {text}")
    typer.echo(_figures(told), err=True)


def _encoding(bits: int | None, layout: Path | None) -> str:
    if bits not in (None, 4):
        raise UserError(f"--bits {bits} is not kept", "give 4, or leave it out to keep weights as stored")
    if bits == 4:
        return "q4"
    if layout is not None:
        from coresident.engines.moe.layout.file import read_header

        return "q4" if read_header(layout.expanduser()).form.encoding == "Q4" else "stored"
    return "stored"


def _figures(told: dict[str, Any]) -> str:
    count = (
        len(told["token_ids"])
        if told["token_ids"] and isinstance(told["token_ids"][0], int)
        else sum(map(len, told["token_ids"]))
    )
    said = [f"{count} tokens"]
    if told["tokens_per_second"] is not None:
        said.append(f"{told['tokens_per_second']:.1f} tok/s")
    if told["hit_rate"] is not None:
        said.append(f"hit rate {told['hit_rate']:.3f}")
        said.append(f"{told['bytes_per_token'] / 2**20:.2f} MiB a token")
    least, most = min(told["slots"]), max(told["slots"])
    slots = f"{least}" if least == most else f"{least} to {most}"
    return (
        ", ".join(said)
        + f" ({slots} of {told['experts']} experts a layer, {told['slots_bytes'] / 2**20:.1f} MiB)"
    )
