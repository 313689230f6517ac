"""How a 4-bit base lies in files: as transformers saves what bitsandbytes has quantised.

Beside `X.weight`, the packed numbers, lie `X.weight.absmax`, `X.weight.quant_map`, with double quantisation
`X.weight.nested_absmax` and `X.weight.nested_quant_map`, and `X.weight.quant_state.bitsandbytes__nf4`, the bytes of a
JSON object with the rest. `config.json` has a `quantization_config`. Needs no torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coresident.engines.pool.base.tensors import Stored
from coresident.engines.pool.quantised.names import STATE
from coresident.engines.pool.quantised.nf4 import Form
from coresident.errors import UserError

# Raise it when the same base would no longer give the same bytes.
WRITER_VERSION = 1

# One kernel serves all; bitsandbytes itself makes these.
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_REMEDY = "use the checkpoint in float32, float16 or bfloat16 it was made from, with base.quantise: nf4 for a 4-bit one"

# What bitsandbytes computes in over a checkpoint that was quantised here.
COMPUTED_IN = "bfloat16"


def config(block_storage: str = "uint8") -> dict[str, Any]:
    """The `quantization_config` of a base that was quantised here: blocks of 64, doubly."""
    return {
        "quant_method": "bitsandbytes",
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_compute_dtype": COMPUTED_IN,
        "bnb_4bit_quant_storage": block_storage,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0,
    }


def quantised(described: Mapping[str, Any]) -> bool:
    """Whether a `config.json` says that the weights are quantised, in whatever format."""
    return bool(described.get("quantization_config"))


def check(file: Path, described: Mapping[str, Any]) -> None:
    """Raise UserError for a `config.json` of a quantised base that is not NF4 as bitsandbytes makes it."""
    if not quantised(described):
        return
    given = described["quantization_config"]
    if not isinstance(given, dict):
        raise UserError(f"{file}: quantization_config is {given!r}", "fetch it again")
    method = given.get("quant_method", "bitsandbytes" if "load_in_4bit" in given else "an unnamed method")
    if method != "bitsandbytes":
        raise UserError(
            f"{file} describes a model quantised by {method}, and only bitsandbytes' NF4 can be trained on",
            _REMEDY,
        )
    if not given.get("load_in_4bit", given.get("_load_in_4bit", False)):
        raise UserError(
            f"{file} describes a model quantised to 8 bits, and only NF4 can be trained on", _REMEDY
        )
    kind = given.get("bnb_4bit_quant_type", "fp4")
    if kind != "nf4":
        raise UserError(
            f"{file} describes a 4-bit model of type {kind}, and only nf4 can be trained on", _REMEDY
        )
    storage = given.get("bnb_4bit_quant_storage", "uint8")
    if storage != "uint8":
        raise UserError(
            f"{file} describes a 4-bit model that is stored as {storage}",
            "save it with bnb_4bit_quant_storage uint8, or use the checkpoint it was made from",
        )


def forms(tensors: Iterable[Stored]) -> dict[str, Form]:
    """Each quantised weight's form, by the name of its layer (`model.layers.0.mlp.up_proj`).

    Raises UserError for a state that cannot be read, is of another type, or does not fit its weight.
    """
    by_name = {stored.name: stored for stored in tensors}
    found = {}
    for name, stored in by_name.items():
        if ".quant_state." not in name:
            continue
        if not name.endswith(f".weight{STATE}"):
            raise UserError(f"{stored.file} holds {name}, and only nf4 weights can be trained on", _REMEDY)
        layer = name.removesuffix(f".weight{STATE}")
        found[layer] = _form(layer, stored, by_name)
    return found


def _form(layer: str, state: Stored, by_name: Mapping[str, Stored]) -> Form:
    again = f"fetch {state.file.name} again"
    try:
        told = json.loads(_bytes(state))
        rows, columns = (int(extent) for extent in told["shape"])
        offset = told.get("nested_offset")
        form = Form(
            (rows, columns),
            int(told["blocksize"]),
            None if offset is None else float(offset),
            0 if offset is None else int(told["nested_blocksize"]),
        )
        kind = told["quant_type"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{state.file}: {state.name} describes no 4-bit weight", again) from None
    if kind != "nf4" or form.block not in BLOCKS or not math.isfinite(form.offset or 0.0):
        raise UserError(
            f"{state.file}: {state.name} says {kind} in blocks of {form.block}, which cannot be used", again
        )
    for part, size in form.sizes.items():
        name = f"{layer}.weight" + ("" if part == "weight" else f".{part}")
        kind = "uint8" if part == "weight" or (part == "absmax" and form.nested) else "float32"
        held = by_name.get(name)
        if held is None or held.shape != size or held.dtype != kind:
            said = "is missing" if held is None else f"is {held.dtype} {list(held.shape)}"
            raise UserError(f"{state.file}: {name} {said}, where {kind} {list(size)} belongs", again)
    return form


def state(form: Form, dtype: str) -> bytes:
    """The JSON bytes that belong to a weight of this form, which was quantised from `dtype`."""
    told = {"quant_type": "nf4", "blocksize": form.block, "dtype": dtype, "shape": list(form.shape)}
    if form.nested:
        told |= {
            "nested_blocksize": form.nested_block,
            "nested_dtype": "float32",
            "nested_offset": form.offset,
        }
    return json.dumps(told).encode()


def _bytes(stored: Stored) -> bytes:
    try:
        descriptor = os.open(stored.file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"{stored.file} cannot be read ({error.strerror})", "check its permissions") from None
    try:
        return os.pread(descriptor, stored.size, stored.offset)
    finally:
        os.close(descriptor)
