"""Traces on their way to a directory and back.

Reading checks everything: a set that is torn, or whose routing cannot be a router's, is refused with one sentence and is
never simulated.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from coresident.engines.moe.place import whole
from coresident.engines.moe.traces import packed, validity
from coresident.engines.moe.traces.manifest import MANIFEST, ROUTING, SCHEMA, Manifest, Traced
from coresident.engines.moe.traces.traces import Trace, Traces, kind
from coresident.errors import UserError

_AGAIN = "trace again, or copy the whole directory again from its source"


def write(traces: Traces, out: Path, pack: bool = False) -> None:
    """Write the set as the new directory `out`, with `pack` a byte a logit; it appears whole or not at all.

    Raises UserError where `out` exists or the routing is none (`validity.check`), MachineError where it cannot be written.
    """
    from safetensors.numpy import save

    validity.check(traces, str(out))
    stored = {"tokens": _joined(one.tokens for one in traces.prompts)}
    stored["experts"] = _joined(one.experts for one in traces.prompts)
    for name in ("logits", "ahead"):
        parts = [getattr(one, name) for one in traces.prompts]
        if all(part is not None for part in parts):
            stored[name] = _joined(parts)
    if pack and "logits" in stored:
        stored["logits"], stored["spans"] = packed.packed(stored["logits"], stored["experts"])
    with whole(out) as aside:
        content = save(stored)
        (aside / ROUTING).write_bytes(content)
        manifest = Manifest(
            schema_version=SCHEMA,
            model=traces.model,
            sampling=traces.sampling,
            depths=traces.depths,
            prompts=tuple(_described(one) for one in traces.prompts),
            routing_bytes=len(content),
            routing_sha256=hashlib.sha256(content).hexdigest(),
        )
        (aside / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Traces:
    """The set in a directory, checked whole. Raises UserError naming the file and what is wrong with it."""
    manifest = read_manifest(path)
    tensors = _tensors(path / ROUTING, manifest)
    lengths = [one.tokens for one in manifest.prompts]
    expected = _shapes(manifest, sum(lengths))
    byte = tensors.get("logits", np.zeros(0)).dtype == np.uint8
    for name in ("tokens", "experts", *(("spans",) if byte else ())):
        if name not in tensors:
            raise UserError(f"{path / ROUTING}: the tensor {name!r} is missing", _AGAIN)
    for name, tensor in tensors.items():
        if name not in expected:
            raise UserError(f"{path / ROUTING}: the tensor {name!r} is none of a trace", _AGAIN)
        shape, kinds = expected[name]
        if tensor.shape != shape and not (name == "ahead" and tensor.shape[:-1] == shape[:-1]):
            raise UserError(
                f"{path / ROUTING}: {name!r} is {list(tensor.shape)}, and the manifest says {list(shape)}",
                _AGAIN,
            )
        if tensor.dtype not in kinds:
            raise UserError(f"{path / ROUTING}: {name!r} is {tensor.dtype}, not {kinds[0].__name__}", _AGAIN)
    if "spans" in tensors:
        tensors["logits"] = packed.unpacked(tensors["logits"], tensors.pop("spans"))
    edges = np.cumsum([0, *lengths])
    parts = {name: [tensor[a:b] for a, b in itertools.pairwise(edges)] for name, tensor in tensors.items()}
    prompts = tuple(
        Trace(
            one.name,
            one.family,
            one.split,
            one.prefill,
            **{name: part[index] for name, part in parts.items()},
        )
        for index, one in enumerate(manifest.prompts)
    )
    found = Traces(manifest.model, manifest.sampling, prompts, manifest.depths)
    validity.check(found, str(path))
    return found


def _described(one: Trace) -> Traced:
    return Traced(
        name=one.name, family=one.family, split=one.split, prefill=one.prefill, tokens=len(one.tokens)
    )


def _joined(parts: Iterable[NDArray[Any]]) -> NDArray[Any]:
    return np.ascontiguousarray(np.concatenate(list(parts)))


def _shapes(manifest: Manifest, tokens: int) -> dict[str, tuple[tuple[int, ...], Sequence[type]]]:
    model = manifest.model
    layers, number = len(model.layers), kind(model.experts)
    return {
        "tokens": ((tokens,), (np.int32,)),
        "experts": ((tokens, layers, model.top_k), (number,)),
        "logits": ((tokens, layers, model.experts), (np.float16, np.float32, np.uint8)),
        "spans": ((tokens, layers, 2), (np.float32,)),
        "ahead": ((tokens, len(manifest.depths), layers, model.experts), (number,)),
    }


def read_manifest(path: Path) -> Manifest:
    """What a set says of itself, without its tensors. Raises UserError naming what is wrong with it."""
    file = path / MANIFEST
    try:
        content = json.loads(file.read_bytes())
    except OSError:
        raise UserError(
            f"{path} is no set of traces: it has no readable {MANIFEST}",
            f"make one (coresident moe trace MODEL --out {path}), or name another"
            " (a study takes --set parameters.traces=DIRECTORY)",
        ) from None
    except ValueError:
        raise UserError(f"{file} is not JSON: it is torn or was edited", _AGAIN) from None
    if isinstance(content, dict) and content.get("schema_version") != SCHEMA:
        raise UserError(
            f"{file} has schema version {content.get('schema_version')!r}, and this reads {SCHEMA}",
            "trace again with this version of coresident",
        )
    if isinstance(content, dict) and content.get("prompts") == []:
        raise UserError(f"{path} holds no prompt", "trace at least one by `coresident moe trace`")
    try:
        return Manifest.model_validate_json(json.dumps(content))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise UserError(f"{file}: {where}: {first['msg']}", _AGAIN) from None


def _tensors(file: Path, manifest: Manifest) -> dict[str, NDArray[Any]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        content = file.read_bytes()
    except OSError:
        raise UserError(f"{file} cannot be read", _AGAIN) from None
    if len(content) != manifest.routing_bytes:
        raise UserError(
            f"{file} has {len(content)} bytes of {manifest.routing_bytes}: it is torn or of another set",
            _AGAIN,
        )
    if hashlib.sha256(content).hexdigest() != manifest.routing_sha256:
        raise UserError(f"{file} is not what was written: its checksum differs", _AGAIN)
    try:
        return dict(load(content))
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{file} is no safetensors file: {error}", _AGAIN) from None
