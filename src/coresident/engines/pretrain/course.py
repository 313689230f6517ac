"""The way a training goes, from its first block to its last: virtual epochs, updates, and each update's learning rate.

All of it follows from how many blocks are done, so that a resumed training needs no other memory of where it is. A block is
`context` targets; a virtual epoch that is no whole number of updates ends on a short one.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from coresident.engines.pretrain.parameters import Schedule


@dataclass(frozen=True)
class Course:
    """`blocks` in all, cut into `epochs` whose ends are multiples of `grain` blocks; a full update has `batch` blocks."""

    blocks: int
    epochs: int
    batch: int
    grain: int = 1

    def end(self, epoch: int) -> int:
        """How many blocks are done when virtual epoch `epoch` (from 0) ends."""
        return self.blocks // self.grain * (epoch + 1) // self.epochs * self.grain

    def epoch(self, done: int) -> int:
        """The virtual epoch of the block after `done` blocks; after the last, the number of epochs."""
        epoch = min(self.epochs, done * self.epochs // max(self.blocks, 1))
        while epoch < self.epochs and self.end(epoch) <= done:
            epoch += 1
        while epoch > 0 and self.end(epoch - 1) > done:
            epoch -= 1
        return epoch

    def due(self, done: int) -> int:
        """How many blocks the next update takes: `batch`, or what is left of its virtual epoch; 0 at the end."""
        epoch = self.epoch(done)
        return 0 if epoch >= self.epochs else min(self.batch, self.end(epoch) - done)

    def updates(self) -> int:
        """How many updates there are, if none is cut short by the end of a pass over the data."""
        ends = [0, *map(self.end, range(self.epochs))]
        return sum(-(-(end - start) // self.batch) for start, end in itertools.pairwise(ends))


def rate(schedule: Schedule, peak: float, done: int, blocks: int) -> float:
    """The learning rate of the update after which `done` of `blocks` blocks are done: linear to `peak` over the share
    `warmup`, then half a cosine (Loshchilov and Hutter, 2017) down to `floor` times `peak`.
    """
    at = done / blocks
    if at <= schedule.warmup and schedule.warmup > 0:
        return peak * at / schedule.warmup
    rest = 1.0 - schedule.warmup
    along = (at - schedule.warmup) / rest
    return peak * (schedule.floor + (1.0 - schedule.floor) * 0.5 * (1.0 + math.cos(math.pi * along)))
