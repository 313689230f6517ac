"""Whether a base on a card is shared: by where each learner's base lies, and by what the whole card says.

A learner's own allocator lists every segment that it took: a base outside of them is another process's
memory. That alone would not show a driver that copies behind a mapping, so the whole card's memory (NVML)
must agree: what a learner adds to it, beyond what its allocator took, is its context and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from coresident.engines.pool.sharing.sharing import TOLERANCE, Decision

if TYPE_CHECKING:
    from torch import Tensor

MIB = 2**20
# A context with its kernels is 0.3 to 0.8 GiB: more than this beside the allocator's own is something else.
CONTEXT = 3 << 29
# From here on a copy of the base cannot be mistaken for a context.
TELLING = 2 << 30


@dataclass(frozen=True)
class DeviceHeld:
    """One learner on the card, in bytes: of its base, `private` lies in its own segments and `mapped` elsewhere;
    `allocated` and `reserved` are its allocator's counts.
    """

    size: int
    private: int
    mapped: int
    allocated: int
    reserved: int


@dataclass(frozen=True)
class DeviceUse:
    """The whole card's memory in use, in bytes: before the pool, with all learners at the barrier, with them gone
    (the golden process alone, if there is one), and at its highest.
    """

    idle: int
    barrier: int
    without: int
    peak: int
    learners: int

    @property
    def marginal(self) -> float:
        """What one learner adds, at the barrier."""
        return (self.barrier - self.without) / self.learners


def held(tensors: Mapping[str, Tensor]) -> DeviceHeld:
    """Measure this process's own hold of its base, after the card has done all it was told."""
    import torch

    torch.cuda.synchronize()
    segments = [
        (int(found["address"]), int(found["address"]) + int(found["total_size"]))
        for found in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    ]
    size = private = 0
    for tensor in tensors.values():
        length = tensor.numel() * tensor.element_size()
        size += length
        if any(start <= tensor.data_ptr() < end for start, end in segments):
            private += length
    return DeviceHeld(
        size, private, size - private, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    )


def decide(asked: str, learners: Sequence[DeviceHeld], use: DeviceUse | None) -> Decision:
    """Whether every learner held its base as `asked` (`none`, `fork` or `fork-copy`); None where the card is unread."""
    if not learners or use is None:
        return Decision(None, "the card's memory in use could not be read")
    shared = asked == "fork"
    for number, seen in enumerate(learners):
        wrong = seen.private if shared else seen.mapped
        if wrong > TOLERANCE * seen.size:
            part = f"{100 * wrong / seen.size:.1f} %"
            what = (
                f"had a private copy of {part} of the base"
                if shared
                else (f"shared {part} of a base that was to be its own")
            )
            return Decision(False, f"learner {number} {what}")
    base = max(seen.size for seen in learners)
    if base < TELLING:
        # Too small to tell from a context: where the memory lies has decided.
        return Decision(True, "")
    reserved = sum(seen.reserved for seen in learners) / len(learners)
    beside = use.marginal - reserved
    if shared and beside > CONTEXT:
        return Decision(
            False,
            f"a learner adds {use.marginal / MIB:.0f} MiB to the card and its allocator holds {reserved / MIB:.0f}:"
            " the difference is more than a context",
        )
    if not shared and use.marginal < (1 - TOLERANCE) * base:
        return Decision(
            False,
            f"a learner adds {use.marginal / MIB:.0f} MiB to the card, less than a base of its own"
            f" ({base / MIB:.0f} MiB)",
        )
    return Decision(True, "")


def shown(learners: Sequence[DeviceHeld], use: DeviceUse | None) -> dict[str, Any]:
    """The figures in MiB, for the record."""
    card = (
        None
        if use is None
        else {
            **{
                f"{key}_mib": round(value / MIB, 1) for key, value in asdict(use).items() if key != "learners"
            },
            "marginal_mib": round(use.marginal / MIB, 1),
        }
    )
    return {
        "card": card,
        "learners": [
            {f"{key}_mib": round(value / MIB, 2) for key, value in asdict(seen).items()} for seen in learners
        ],
    }
