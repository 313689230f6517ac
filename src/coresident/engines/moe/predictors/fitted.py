"""A predictor: fitted on the fit prompts only, kept in a directory, and never judged on what it was fitted on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from coresident.engines.moe.place import whole
from coresident.engines.moe.predictors import counting, probe
from coresident.engines.moe.predictors.kinds import ACROSS, FITTED, Kind
from coresident.engines.moe.traces import validity
from coresident.engines.moe.traces.traces import Traces, same_model
from coresident.errors import UserError
from coresident.workload import Parameters

DESCRIPTION, TABLES = "predictor.json", "predictor.safetensors"
_AGAIN = "fit it again by `coresident moe fit-predictor`"


class Description(Parameters):
    """`predictor.json`. `seen` are the keys of the prompts it was fitted on: on those it is never judged."""

    schema_version: Literal[1] = 1
    kind: Kind
    depth: Annotated[int, Field(ge=1)]
    model: str
    layers: int
    experts: int
    seen: Annotated[tuple[str, ...], Field(strict=False)] = ()
    tables_sha256: str = ""


@dataclass(frozen=True)
class Fitted:
    """A predictor and the tables it needs: `static` has `scores` [L, N]; `transition` `scores` [L, N, N]; `probe` `weights`
    [L, N, N] and `biases` [L, N]; the others none.
    """

    described: Description
    tables: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


def fit(kind: Kind, depth: int, traces: Traces) -> Fitted:
    """Fit on the fit prompts of `traces`, whatever else the set holds. Raises UserError where they will not do."""
    deep_enough(kind, depth, traces.layers)
    tables: dict[str, NDArray[np.float32]] = {}
    seen: tuple[str, ...] = ()
    if kind in FITTED:
        own = traces.of("fit")
        seen = tuple(sorted({validity.key(one) for one in own.prompts}))
        if kind == "static":
            tables = {"scores": counting.frequency(own)}
        elif kind == "transition":
            tables = {"scores": counting.transition(own, depth)}
        else:
            weights, biases = probe.fit(own, depth)
            tables = {"weights": weights, "biases": biases}
    model = traces.model
    described = Description(
        kind=kind, depth=depth, model=model.identity, layers=traces.layers, experts=model.experts, seen=seen
    )
    return Fitted(described, tables)


def unseen(fitted: Fitted, traces: Traces) -> None:
    """Refuse to judge a predictor on traces of another model, or on a prompt that it was fitted on."""
    same_model(traces, fitted.described.model, f"predictor {fitted.described.kind}")
    known = set(fitted.described.seen)
    for one in traces.prompts:
        if validity.key(one) in known:
            raise UserError(
                f"predictor {fitted.described.kind} was fitted on prompt {one.name!r}",
                "judge it on held-out prompts only",
            )


def deep_enough(kind: Kind, depth: int, layers: int) -> None:
    """Refuse a depth that leaves nothing to predict."""
    most = layers - 1 if kind in ACROSS else layers
    if not 1 <= depth <= most:
        raise UserError(
            f"predictor {kind} cannot look {depth} layers ahead in a model with {layers} layers of experts",
            f"give a depth of 1 to {most}" if most else "choose a predictor that looks at the token before",
        )


def save(fitted: Fitted, out: Path) -> None:
    """Write it as the new directory `out`, whole or not at all."""
    from safetensors.numpy import save as packed

    content = packed({name: np.ascontiguousarray(table) for name, table in fitted.tables.items()})
    described = fitted.described.model_copy(update={"tables_sha256": hashlib.sha256(content).hexdigest()})
    with whole(out) as aside:
        (aside / TABLES).write_bytes(content)
        (aside / DESCRIPTION).write_text(described.model_dump_json(indent=1) + "\n", encoding="utf-8")


def directory(kind: Kind, depth: int) -> str:
    """What one of several predictors that are kept together is called."""
    return f"{kind}-{depth}"


def choose(path: Path, kind: Kind, depth: int) -> Fitted:
    """The predictor `kind` at `depth` in a directory: it alone, or one of those that `fit-predictor --out` kept there."""
    several = path / directory(kind, depth)
    if not (path / DESCRIPTION).exists() and several.is_dir():
        return load(several)
    kept = sorted(one.parent.name for one in path.glob(f"*/{DESCRIPTION}"))
    if kept and not (path / DESCRIPTION).exists():
        raise UserError(
            f"{path} keeps no predictor {kind} at depth {depth}, but {', '.join(kept)}",
            "choose one of them, or leave `fitted` out: then it is fitted here",
        )
    found = load(path)
    if (found.described.kind, found.described.depth) != (kind, depth):
        raise UserError(
            f"{path} is predictor {found.described.kind} at depth {found.described.depth}, "
            f"not {kind} at depth {depth}",
            "give its own kind and depth, or another directory",
        )
    return found


def load(path: Path) -> Fitted:
    """The predictor in a directory. Raises UserError where it is torn or none."""
    from safetensors import SafetensorError
    from safetensors.numpy import load as unpacked

    try:
        content = (path / TABLES).read_bytes()
        described = Description.model_validate_json((path / DESCRIPTION).read_bytes())
    except OSError:
        raise UserError(
            f"{path} is no fitted predictor", "make one: coresident moe fit-predictor TRACES --out DIRECTORY"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise UserError(f"{path / DESCRIPTION}: {where}: {first['msg']}", _AGAIN) from None
    if hashlib.sha256(content).hexdigest() != described.tables_sha256:
        raise UserError(f"{path / TABLES} is not what was written: its checksum differs", _AGAIN)
    try:
        return Fitted(described, dict(unpacked(content)))
    except (SafetensorError, ValueError, json.JSONDecodeError) as error:
        raise UserError(f"{path / TABLES}: {error}", _AGAIN) from None
