"""What a model says on text that it was not trained on: its mean cross-entropy over real targets, whole and for each family.

A loss is a sum over targets divided by their number, so that no batch, however short, weighs more than its targets do. Beside
it stands the loss of a unigram model (each token's frequency in the training split, one added to each count): what a model
knows that has learned nothing but which tokens are common.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from coresident.engines.pretrain.update import LossFunction
from coresident.errors import UserError
from coresident.text import unigram as common
from coresident.text.blocks import IGNORED, Blocks
from coresident.text.cache import TokenCache

if TYPE_CHECKING:
    from coresident.text.blocks import Integers

# Windows in memory at once.
AT_ONCE = 4096


@dataclass(frozen=True)
class Sum:
    """Cross-entropy in nats summed over `targets` targets."""

    nats: float
    targets: int

    @property
    def loss(self) -> float:
        """Nats a target."""
        return self.nats / self.targets

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.nats + other.nats, self.targets + other.targets)


def held_out(
    cache: TokenCache, context: int, subset: int | None = None
) -> dict[str, tuple[Blocks, Integers]]:
    """The validation split by family: its windows, and which of them are evaluated.

    `subset` targets at most, to a window, are shared out over families by their size and spread evenly within each; None
    takes all. Families without a target are left out; raises UserError if all are.
    """
    streams = {family: cache.tokens("validation", family) for family in cache.families}
    split = {family: Blocks(stream, context) for family, stream in streams.items() if len(stream) >= 2}
    if not split:
        raise UserError(
            f"the validation split of {cache.path} holds no target",
            "prepare it with a larger source.validation_share, or set validation.subset=0 and validation.full=false",
        )
    total = sum(blocks.targets for blocks in split.values())
    return {
        family: (blocks, blocks.evenly(None if subset is None else _share(subset, blocks, total)))
        for family, blocks in split.items()
    }


def _share(subset: int, blocks: Blocks, total: int) -> int:
    return max(1, round(subset * blocks.targets / total / blocks.context))


def evaluate(
    losses: LossFunction,
    text: Mapping[str, tuple[Blocks, Integers]],
    batch: int,
    device: torch.device,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Sum] | None:
    """Each family's sum, `batch` windows at a time; None if it was stopped before it was through."""
    found: dict[str, Sum] = {}
    for family, (blocks, ids) in text.items():
        nats = torch.zeros((), dtype=torch.float64, device=device)
        targets = 0
        for start in range(0, len(ids), batch):
            if stopped():
                return None
            windows = blocks.windows(ids[start : start + batch])
            inputs = torch.from_numpy(windows.inputs()).to(device)
            wanted = torch.from_numpy(windows.targets()).to(device)
            with torch.no_grad():
                nats += losses(inputs, wanted)[0].double()
            targets += windows.valid
        found[family] = Sum(float(nats), targets)
    return found


def whole(families: Mapping[str, Sum]) -> Sum:
    """All families as one."""
    return sum(families.values(), Sum(0.0, 0))


def told(families: Mapping[str, Sum]) -> dict[str, Any]:
    """As a row tells it: `loss`, `targets`, and each family's loss."""
    total = whole(families)
    return {
        "loss": total.loss,
        "targets": total.targets,
        "families": {name: one.loss for name, one in families.items()},
    }


def unigram(cache: TokenCache, text: Mapping[str, tuple[Blocks, Integers]]) -> dict[str, Sum]:
    """The unigram model's sums over the same targets."""
    counts = common.counts(cache, "train") + 1.0
    nats = np.log(counts.sum()) - np.log(counts)
    found = {}
    for family, (blocks, ids) in text.items():
        total, targets = 0.0, 0
        for start in range(0, len(ids), AT_ONCE):
            windows = blocks.windows(ids[start : start + AT_ONCE])
            wanted = windows.targets()
            total += float(nats[wanted[wanted != IGNORED]].sum())
            targets += windows.valid
        found[family] = Sum(total, targets)
    return found
