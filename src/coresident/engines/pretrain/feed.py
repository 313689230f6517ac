"""From the data's order to microbatches on the device, one update ahead of what is computed.

What an update gets follows from the course and the cursor alone. An update that meets the end of a pass is filled up from the
next pass. On a card each update's tokens are copied from pinned memory on a stream of their own while the update before
is still computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from coresident.engines.pretrain.course import Course
from coresident.engines.pretrain.update import Microbatch
from coresident.text.blocks import Windows
from coresident.text.order import Batch, Cursor, Order, Reader

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Portion:
    """An update's data: its microbatches, `blocks` and `valid` targets, the cursor after it, and a short hash of the
    `samples` in their order.
    """

    microbatches: list[Microbatch]
    blocks: int
    valid: int
    cursor: Cursor
    samples: str


class Feed:
    """The portions of a course from `blocks` done blocks and `cursor` on. Close it, or use it up."""

    def __init__(
        self,
        order: Order,
        course: Course,
        microbatch: int,
        device: torch.device,
        blocks: int,
        cursor: Cursor,
        prefetch: bool,
    ) -> None:
        self._course, self._microbatch, self._device = course, microbatch, device
        self._blocks = blocks
        self._reader = order.reader(cursor, prefetch)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[Portion]:
        ahead = self._next()
        while ahead is not None:
            portion, ready = ahead
            ahead = self._next()
            if ready is not None:
                current = torch.cuda.current_stream(self._device)
                current.wait_event(ready)
                for one in portion.microbatches:
                    # Made on another stream: its memory must not be reused before this one is through with it.
                    one.tokens.record_stream(current)
                    one.targets.record_stream(current)
            yield portion

    def close(self) -> None:
        """End the thread that reads ahead."""
        self._reader.close()

    def _next(self) -> tuple[Portion, torch.cuda.Event | None] | None:
        due = self._course.due(self._blocks)
        if not due:
            return None
        batch = take(self._reader, due)
        self._blocks += due
        if self._stream is None:
            return self._portion(batch), None
        with torch.cuda.stream(self._stream):
            portion = self._portion(batch)
            return portion, self._stream.record_event()

    def _portion(self, batch: Batch) -> Portion:
        parts = microbatches(batch, self._microbatch)
        placed = [
            Microbatch(self._placed(one.inputs()), self._placed(one.targets()), one.valid) for one in parts
        ]
        samples = hashlib.sha256(batch.ids.astype("<i8").tobytes()).hexdigest()[:16]
        return Portion(placed, len(batch), batch.valid, batch.cursor, samples)

    def _placed(self, values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
        tensor = torch.from_numpy(values)
        if self._stream is None:
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def take(reader: Reader, windows: int) -> Batch:
    """Exactly so many windows, over the ends of passes."""
    parts = [reader.take(windows)]
    while (missing := windows - sum(map(len, parts))) > 0:
        parts.append(reader.take(missing))
    if len(parts) == 1:
        return parts[0]
    return Batch(
        np.concatenate([one.ids for one in parts]),
        np.concatenate([one.tokens for one in parts]),
        np.concatenate([one.lengths for one in parts]),
        parts[-1].cursor,
    )


def microbatches(batch: Windows, size: int) -> list[Windows]:
    """The same windows in the same order, `size` at a time; the last ones may be fewer."""
    starts = range(0, len(batch), size)
    return [
        Windows(batch.ids[at : at + size], batch.tokens[at : at + size], batch.lengths[at : at + size])
        for at in starts
    ]
