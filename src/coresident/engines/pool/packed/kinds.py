"""Which step a pack takes: what was asked, and what the base and the device allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from coresident.engines.pool.packed.arena import Arena
from coresident.engines.pool.packed.decoder import agrees
from coresident.engines.pool.packed.layers import layers_of
from coresident.engines.pool.packed.policy import Policy
from coresident.engines.pool.packed.step import Step
from coresident.engines.pool.packed.written import Written
from coresident.engines.pool.parameters import DPO
from coresident.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Kind:
    """A kind of step by its name (`eager`, `compiled`, `captured`), and how one is made."""

    name: str
    make: Callable[[Policy, Arena, Sequence[DPO], Tensor], Step]


EAGER = Kind("eager", Step)


def chosen(policy: Policy, asked: str) -> Kind:
    """The kind of step that will be taken. Raises UserError for one that this base or its device cannot take."""
    device = policy.device
    if asked == "auto":
        fits = device.type == "cuda" and not isinstance(layers_of(policy), str) and agrees(policy)
        asked = "captured" if fits else "eager"
    if asked == "eager":
        return EAGER
    if asked == "captured" and device.type != "cuda":
        raise UserError("step: captured is a CUDA graph, and this runs on the CPU", "use step: eager or auto")
    found = layers_of(policy)
    reason = found if isinstance(found, str) else "" if agrees(policy) else "the forward pass is another"
    if reason:
        raise UserError(
            f"step: {asked} is for decoders of Llama's kind, and of this base {reason}", "use step: eager"
        )
    if asked == "compiled":
        return Kind(asked, partial(Written, compile=True))
    from coresident.engines.pool.packed.captured import Captured

    return Kind(asked, Captured)
