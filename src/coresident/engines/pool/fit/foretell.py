"""`coresident pool fit`: what a run would take, for several numbers of learners, as what is printed or given as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coresident.engines.pool.base import base, shapes
from coresident.engines.pool.card import device_rules
from coresident.engines.pool.card.mps import CLIENT_LIMIT
from coresident.engines.pool.fit import architecture, data, forward
from coresident.engines.pool.fit.forward import Rows
from coresident.engines.pool.fit.predict import ARMS, CONTEXTS, MOST, ROUNDING, Prediction, Predictor
from coresident.engines.pool.parameters import DPO, LINEAR_LAYERS
from coresident.engines.pool.peers.rules import check_only_measured
from coresident.engines.pool.quantised import checkpoint
from coresident.engines.pool.sizes import show
from coresident.errors import UserError, nearest

MIB = 2**20
DOUBLING = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# What stands together in the table.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "base": (forward.BASE,),
    "contexts": (CONTEXTS,),
    "adapters": (forward.ADAPTER, forward.OPTIMIZER, forward.GRADIENTS),
    "activations": (forward.ACTIVATIONS,),
    "logits": (forward.LOGITS,),
    "transients": (forward.TRANSIENTS, forward.WORKSPACES),
    "rounding": (ROUNDING,),
}


@dataclass(frozen=True)
class Foretold:
    """`points` are for the numbers of learners that were asked for; `largest` is how many fit into `memory` bytes, which each
    number in `misfits` does not, though it is smaller.
    """

    settings: DPO
    base: int
    nf4: bool
    rows: str
    memory: int
    points: tuple[Prediction, ...]
    largest: int
    misfits: tuple[int, ...]


def arm(name: str) -> str:
    """The `sharing` of an arm by its name. Raises UserError for one whose memory is not known."""
    if name not in ARMS:
        raise UserError(f"--arm {name!r} is none whose memory can be foretold", nearest(name, ARMS))
    return ARMS[name]


def foretell(settings: DPO, counts: Sequence[int], memory: int, width: int | None) -> Foretold:
    """Go through `settings` with each number of learners in `counts` (none: 1, 2, 4 ... up to the first that does not
    fit). Rows are all `width` tokens long; None: as long as the run's data make them.

    Raises UserError for a base that cannot be used or is of an unknown family.
    """
    if settings.sharing not in ARMS.values():
        raise UserError(
            f"sharing: {settings.sharing} is none whose memory can be foretold", f"--arm: {', '.join(ARMS)}"
        )
    if settings.own and any(settings.of(number) != settings.of(0) for number in range(settings.learners)):
        raise UserError(
            "pool fit: own: learners that differ are not foretold",
            "leave own out, and give all what the largest has",
        )
    settings = settings.of(0)
    if width is not None and not 1 <= width <= settings.max_length:
        raise UserError(
            f"--row-tokens {width}: rows have 1 to max_length tokens, and max_length is {settings.max_length}",
            "give another number, or raise it: --set max_length=N",
        )
    for target in settings.targets:
        if target not in LINEAR_LAYERS:
            raise UserError(f"targets: no layer {target!r} is known", nearest(target, LINEAR_LAYERS))
    described = _described(settings)
    shape = architecture.of(described, _named(settings))
    if settings.sharing == "packed":
        architecture.check_packed(described, settings.max_length)
    nf4 = settings.base.quantise == "nf4" or checkpoint.quantised(described)
    if settings.sharing == "trl":
        check_only_measured(settings)
        if nf4:
            raise UserError("--arm trl over a 4-bit base is not foretold", "use another base")
    size = base.estimate(settings.base, settings.dtype)
    rows = data.looked_up(settings) if width is None else [data.full(settings, width)]
    predictor = Predictor(settings, shape, size, nf4, rows)
    for count in counts:
        device_rules.check(settings.model_copy(update={"learners": count}))
    largest, misfits = predictor.largest(memory)
    if settings.mps == "on":
        # The golden process is a client too.
        largest = min(largest, CLIENT_LIMIT - (settings.sharing in ("fork", "fork-copy")))
    points = [predictor.at(count) for count in counts or _doubling(largest)]
    return Foretold(settings, size, nf4, _said(rows, width), memory, tuple(points), largest, misfits)


def as_json(found: Foretold) -> dict[str, Any]:
    """Bytes throughout."""
    return {
        "arm": next(name for name, sharing in ARMS.items() if sharing == found.settings.sharing),
        "device_memory": found.memory,
        "base": found.base,
        "nf4": found.nf4,
        "rows": found.rows,
        "largest": found.largest,
        "misfits": found.misfits,
        "points": [
            {
                "learners": one.learners,
                "total": one.total,
                "fits": one.total <= found.memory,
                "parts": one.parts,
            }
            for one in found.points
        ],
    }


def lines(found: Foretold) -> list[str]:
    """For a terminal: MiB in the table."""
    kind = "NF4" if found.nf4 else found.settings.dtype
    told = [
        f"base     {_named(found.settings)} in {kind}, {show(found.base)}",
        f"rows     {found.rows}",
        "",
        f"{'learners':>8}{'MiB':>10}" + "".join(f"{name:>13}" for name in COLUMNS),
    ]
    for one in found.points:
        parts = (sum(one.parts[part] for part in names) for names in COLUMNS.values())
        row = f"{one.learners:>8}{one.total / MIB:>10,.0f}" + "".join(
            f"{part / MIB:>13,.0f}" for part in parts
        )
        told.append(row + ("" if one.total <= found.memory else "  does not fit"))
    more = " or more" if found.largest == MOST else ""
    if found.settings.mps == "on" and found.largest >= CLIENT_LIMIT - 1:
        more = " (which is as many as MPS serves)"
    plural = "" if found.largest == 1 else "s"
    fit = f"{found.largest} learner{plural}{more} fit into {show(found.memory)}"
    if found.misfits:
        fit += f", and {', '.join(map(str, found.misfits))} do not: their logits are made in fewer pieces"
    return [*told, "", fit if found.largest else f"not one learner fits into {show(found.memory)}"]


def _doubling(largest: int) -> list[int]:
    below = [count for count in DOUBLING if count <= largest]
    beyond = [count for count in DOUBLING if count > largest][:1]
    return sorted({*below, *beyond, *([largest] if largest else [])})


def _described(settings: DPO) -> Mapping[str, Any]:
    if settings.base.config is not None:
        return shapes.SHAPES[settings.base.config]
    return base.read(base.source(settings.base, settings.dtype)).config


def _named(settings: DPO) -> str:
    return settings.base.config or str(Path(settings.base.path or "") / "config.json")


def _said(rows: Sequence[Sequence[Rows]], width: int | None) -> str:
    first = rows[0][0]
    if width is not None:
        return f"{first.sequences} a step, all of {width} tokens (say --data to have them looked up)"
    widest = max(one.width for part in rows for one in part)
    most = max(one.scored for part in rows for one in part)
    return (
        f"{first.sequences} a step, of up to {widest} tokens in the data; at most {most} predicted in a step"
    )
