"""How many experts of each layer may be resident, from slots or from bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from coresident.engines.moe.cache import require
from coresident.engines.moe.models.architecture import Architecture
from coresident.errors import UserError

_UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")


def parse_size(text: str, name: str) -> int:
    """The bytes of `6GiB` or `512 MiB`; `name` is what the user gave it as."""
    told = _SIZE.fullmatch(text)
    if told is None or told[2] not in _UNITS or float(told[1]) == 0:
        raise UserError(f"{name} {text!r} is no size", "write a number and a unit, such as 6GiB or 512MiB")
    return int(float(told[1]) * _UNITS[told[2]])


def from_slots(found: Architecture, slots: int) -> list[int]:
    """The same number of slots in each layer. Raises UserError for fewer than a token needs or more than there are experts."""
    capacities = [slots] * len(found.mixtures)
    require(capacities, found.top_k)
    if slots > found.experts:
        raise UserError(
            f"{slots} slots a layer are more than its {found.experts} experts",
            f"give at most {found.experts}",
        )
    return capacities


def by_layer(found: Architecture, slots: tuple[int, ...]) -> list[int]:
    """Slots given for each layer that has experts."""
    if len(slots) != len(found.mixtures):
        raise UserError(
            f"slots are given for {len(slots)} layers, and {len(found.mixtures)} have experts",
            "give one number for each layer that has experts",
        )
    for each in slots:
        from_slots(found, each)
    return list(slots)


def require_a_step(capacities: Sequence[int], experts: int, pairs: int) -> None:
    """Refuse slots that do not hold what a step of `pairs` (row, expert) may need: kernels bring that in at once."""
    needed, least = min(pairs, experts), min(capacities)
    if needed > least:
        raise UserError(
            f"kernels cannot bring in the {needed} experts that a step may need into {least} slots",
            f"give at least {needed} slots a layer or fewer rows, or fills: auto",
        )


def from_bytes(found: Architecture, memory: int, always: int, record: int) -> list[int]:
    """As many slots as fit into `memory` beside the `always` resident bytes; what is left goes to the first layers."""
    layers = len(found.mixtures)
    room = memory - always
    total = min(max(room, 0) // record, layers * found.experts)
    if total < layers * found.top_k:
        least = layers * found.top_k * record
        raise UserError(
            f"a device memory of {memory / 2**20:,.1f} MiB is too small: dense weights, keys and values take"
            f" {always / 2**20:,.1f} MiB, and {found.top_k} experts in each of {layers} layers {least / 2**20:,.1f} MiB",
            f"give at least {-(-(always + least) // 2**20)} MiB",
        )
    each, more = divmod(total, layers)
    return [min(each + (layer < more), found.experts) for layer in range(layers)]
