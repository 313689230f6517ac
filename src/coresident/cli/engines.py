"""What the commands of every engine share: settings from a file and from `--set`, one device, and how they speak.

A voice that nobody hears any more (a closed pipe, a full disk) falls silent: what it would have told is no reason to end a
training. A result that cannot be written is an error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from coresident.errors import MachineError, UserError

if TYPE_CHECKING:
    from coresident.workload import Parameters


def one_device(text: str) -> str:
    """`cpu`, or the UUID of the one card that is meant. Raises UserError where several are."""
    if text == "cpu":
        return text
    from coresident.lab.run.machine.devices import resolve

    found = resolve(text)
    if len(found) != 1:
        raise UserError(f"--device {text!r} names {len(found)} devices", "train on one: cpu, cuda, or cuda:1")
    return found[0].uuid


def read(config: Path | None) -> dict[str, Any]:
    """A file of settings as a plain mapping; nothing without one."""
    if config is None:
        return {}
    from coresident.lab.study import source

    try:
        text = config.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{config} cannot be read: {reason}", "give a readable YAML file") from None
    value, _ = source.read(text, str(config))
    if not isinstance(value, dict | None):
        raise UserError(f"{config}: not a mapping of settings", "write it as lines of `key: value`")
    return value or {}


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, mapping by mapping."""
    return below | {
        key: merged(below[key], value)
        if isinstance(value, dict) and isinstance(below.get(key), dict)
        else value
        for key, value in above.items()
    }


def checked(model: type[Parameters], asked: dict[str, Any], changes: Sequence[str], origin: str) -> Any:
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


def voices(stream: TextIO, quiet: bool) -> tuple[Callable[[str], None], Callable[[str], None]]:
    """How a training speaks: in lines, and on a terminal in one last line that is written over."""
    shown = stream.isatty() and not quiet
    clear = "\r\x1b[K" if shown else ""

    def write(text: str) -> None:
        try:
            stream.write(text)
            stream.flush()
        except OSError:
            _silence(stream)

    def say(text: str) -> None:
        if not quiet:
            write(f"{clear}{text}\n")

    def now(text: str) -> None:
        if shown:
            write(f"{clear}{text[:100]}")

    return say, now


def echo(text: str) -> None:
    """A result on standard output. Raises MachineError where it cannot be written."""
    try:
        typer.echo(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _silence(sys.stdout)
        raise MachineError(
            f"standard output cannot be written: {error.strerror}", "free space there, or send it elsewhere"
        ) from None


def show(told: dict[str, Any], as_json: bool) -> None:
    """A result as JSON, or as a table of names and values."""
    if as_json:
        echo(json.dumps(told, indent=1, allow_nan=False))
        return
    for name, value in told.items():
        if isinstance(value, dict):
            for inner, one in value.items():
                echo(f"{name + '.' + inner:<32}{_written(one)}")
        elif value is not None:
            echo(f"{name:<32}{_written(value)}")


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {_written(one)}" for name, one in value.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _silence(stream: TextIO) -> None:
    """Nothing that is still to come, or waits in the stream's buffer, can fail any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
