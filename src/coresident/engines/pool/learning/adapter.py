"""A trained adapter as files that PEFT loads, and one digest of what was learned."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coresident.engines.pool.learning.learner import NonFinite
from coresident.engines.pool.learning.outputs import CONFIG, ORIGIN, WEIGHTS, check_base
from coresident.errors import MachineError, UserError

if TYPE_CHECKING:
    from torch import Tensor, nn


def export(
    model: nn.Module, out: Path, origin: Mapping[str, Any] | None = None, replace: bool = False
) -> str:
    """Write the model's adapter as the directory `out`, as `write` does; return its digest."""
    return write(adapter_tensors(model), config(model), out, origin, replace)


def write(
    tensors: Mapping[str, Tensor],
    described: str,
    out: Path,
    origin: Mapping[str, Any] | None = None,
    replace: bool = False,
) -> str:
    """Write an adapter as the directory `out` (`adapter_model.safetensors`, `adapter_config.json` with the text `described`,
    and with its `origin` (`base`, `steps`) also `coresident.json`); return its digest.

    The directory appears whole or not at all; with `replace`, in place of one that is there. Raises NonFinite for
    an adapter with a value that is not finite, UserError where `out` exists, MachineError where it cannot be
    written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise NonFinite(f"the adapter's {name} has values that are not finite, so it was not exported")
    if out.exists() and not replace:
        raise UserError(f"{out} exists already", "choose another place for the adapter or remove it")
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        save_file(dict(tensors), aside / WEIGHTS, metadata={"format": "pt"})
        (aside / CONFIG).write_text(described, encoding="utf-8")
        if origin is not None:
            (aside / ORIGIN).write_text(json.dumps(dict(origin), indent=2) + "\n", encoding="utf-8")
        if replace:
            shutil.rmtree(out, ignore_errors=True)
        aside.rename(out)
    except (OSError, SafetensorError) as error:
        raise MachineError(
            f"the adapter cannot be written to {out}: {error}", "free space there or choose another --out"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return digest(tensors)


def load(model: nn.Module, adapter: Path, base: str) -> None:
    """Give the adapter of `model`, whose base has the identity `base`, the values of a PEFT adapter's directory.

    Raises UserError where it was trained on another base, or does not fit.
    """
    check_base(adapter, base)
    put(model, read(adapter), str(adapter))


def read(adapter: Path) -> dict[str, Tensor]:
    """The tensors of a PEFT adapter's directory, by name. Raises UserError where they cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = adapter / WEIGHTS
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"{file} cannot be read ({said})", "give a directory that PEFT saved") from None
    return tensors


def put(model: nn.Module, tensors: Mapping[str, Tensor], origin: str) -> None:
    """Copy an adapter's tensors, under PEFT's file names, into the model's. Raises UserError where they do not fit."""
    ours = {
        name.replace(".default.", "."): value for name, value in model.named_parameters() if ".lora_" in name
    }
    for name in sorted(ours.keys() ^ tensors.keys()):
        which = "lacks" if name in ours else "has"
        raise UserError(
            f"{origin} {which} {name}, unlike the adapter that was asked for",
            "give the base that it was trained on, and the same targets",
        )
    with torch.no_grad():
        for name, value in ours.items():
            if value.shape != tensors[name].shape:
                raise UserError(
                    f"{origin}: {name} is {list(tensors[name].shape)}, and {list(value.shape)} was asked for",
                    "give the base that it was trained on, and the same rank",
                )
            value.copy_(tensors[name])


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The adapter's tensors on the CPU under PEFT's file names (`base_model.model.<path>.lora_A.weight`), by
    name.
    """
    from peft import get_peft_model_state_dict

    # "auto" would look the base up on the hub to see whether its vocabulary was resized.
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: state[name].detach().cpu().contiguous() for name in sorted(state)}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) over every tensor's name, dtype, shape and bytes, in the order of names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        header = json.dumps([name, str(tensor.dtype), list(tensor.shape)])
        total.update(f"{len(header)}:{header}".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def config(model: nn.Module, **own: Any) -> str:
    """The text of the model's `adapter_config.json`, with `own` values in place of the model's."""
    found: dict[str, Any] = model.peft_config["default"].to_dict()  # type: ignore[index, union-attr]
    found |= {"inference_mode": True, **own}
    # A set has no order, and a file that differs from run to run looks like a result that does.
    ordered = {
        key: sorted(value) if isinstance(value, set | frozenset) else value for key, value in found.items()
    }
    return json.dumps(ordered, indent=2, sort_keys=True) + "\n"
