"""What a training takes of memory at the least, said before it starts: on a CPU the kernel ends, without a word, a process
that takes more than there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from coresident.engines.pretrain.recipe import Recipe
from coresident.errors import MachineError
from coresident.model.shape import ModelShape, parameters_of

if TYPE_CHECKING:
    from coresident.text.cache import TokenCache

# Weights, gradients and two moments, all float32.
TRAINED, WEIGHTS = 16, 4
# An interpreter with torch, rounded down: needs are a lower bound.
INTERPRETER = 250 << 20
# Rows of logits at a time that are worth trying where all of them are too many.
FEWER_ROWS = 1024
# What is proposed takes this part of what is free at the most, since it is a lower bound too.
ROOM = 2


@dataclass(frozen=True)
class Load:
    """What is computed at once: `microbatch` sequences that are learned, `batch` (0: none) that are evaluated, with `rows` of
    logits at a time (0: all); `width` is the bytes of a product, `parameter` those that are kept for each parameter.
    """

    shape: ModelShape
    microbatch: int
    batch: int
    rows: int
    width: int = 4
    parameter: int = TRAINED

    def update(self) -> int:
        """Bytes of a microbatch, forward and backward, at its highest: a lower bound.

        Counted from what PyTorch keeps for the backward pass of `model/llama.py`, per token: in each layer 12 d + 4 f numbers
        (a block's input, its scaled and its weighted norm, twice; queries, keys and values; the two that were turned; what
        attention gives; gate and up, silu(gate), and the product), with f the width of all experts that a token is sent to; and
        where the loss begins, 3 V in float32 (the log-softmax, its gradient and that of the logits). Attention's own, gradients
        on their way and an allocator's room are left out: measured peaks are 1.0 to 1.3 times as high with whole logits in
        float32, and up to 1.9 times in bfloat16 or with few rows of logits.
        """
        tokens = self.microbatch * self.shape.context
        inner = self.shape.feedforward or 0
        if self.shape.mixture is not None:
            inner = self.shape.mixture.top_k * self.shape.mixture.width
        kept = tokens * self.shape.layers * (12 * self.shape.width + 4 * inner) * self.width
        return kept + 3 * 4 * self._logits(tokens)

    def evaluation(self) -> int:
        """Bytes of a batch that is evaluated: the logits and their log-softmax; of the layers nothing is kept."""
        return 2 * 4 * self._logits(self.batch * self.shape.context)

    def total(self) -> int:
        """Bytes of all: what is kept for the parameters, and the larger of the two."""
        highest = max(self.update() if self.microbatch else 0, self.evaluation())
        return parameters_of(self.shape) * self.parameter + highest

    def _logits(self, tokens: int) -> int:
        return min(tokens, self.rows or tokens) * self.shape.vocabulary


def load(recipe: Recipe, held_out: int | None = None) -> Load:
    """What a training computes at once; `held_out` are the sequences that there are to evaluate (None: plenty)."""
    settings = recipe.settings
    batch = settings.validation.batch if held_out is None else min(settings.validation.batch, held_out)
    return Load(
        recipe.shape,
        recipe.microbatch,
        batch if settings.validation.full or settings.validation.subset else 0,
        settings.runtime.loss_chunk,
        2 if recipe.precision == "bfloat16" else 4,
    )


def held_out(cache: TokenCache, recipe: Recipe) -> int:
    """The most sequences of one family that are evaluated: a batch is never of two."""
    families = [one.tokens for one in cache.manifest.streams if one.split == "validation"]
    largest, validation = max(families, default=0), recipe.settings.validation
    if not validation.full:
        largest = min(largest, (validation.subset or 0) * largest // max(sum(families), 1))
    return largest // recipe.shape.context


def check_training(asked: Load, blocks: int, free: int) -> None:
    """Raise MachineError, which says what to set, for a training that takes more than `free` bytes. `blocks` are the sequences
    of an update.
    """
    if INTERPRETER + asked.total() <= free:
        return
    divisors = [one for one in range(1, asked.microbatch + 1) if blocks % one == 0]
    remedies = [
        words
        for rows in dict.fromkeys((asked.rows, min(asked.rows or FEWER_ROWS, FEWER_ROWS)))
        if (words := _changes(replace(asked, rows=rows), asked, divisors, free // ROOM))
    ]
    raise MachineError(
        f"this training takes at least {_gib(INTERPRETER + asked.total())} of memory (microbatch {asked.microbatch}: "
        f"{_gib(asked.update())}, validation.batch {asked.batch}: {_gib(asked.evaluation())}), and {_gib(free)} are free",
        " or ".join(remedies) or "take a smaller model or context: no microbatch of it fits well",
    )


def check_evaluation(shape: ModelShape, batch: int, rows: int, free: int) -> None:
    """Raise MachineError for an evaluation of `batch` sequences at once that takes more than `free` bytes."""
    asked = Load(shape, 0, batch, rows, parameter=WEIGHTS)
    if INTERPRETER + asked.total() <= free:
        return
    fits = _largest(range(1, batch), lambda one: replace(asked, batch=one), free // ROOM)
    raise MachineError(
        f"an evaluation of {batch} sequences at once takes at least {_gib(INTERPRETER + asked.total())} of memory, and"
        f" {_gib(free)} are free",
        f"give --batch {fits}"
        if fits
        else "free memory, or use a larger machine: not one sequence fits well",
    )


def _changes(tried: Load, asked: Load, divisors: list[int], free: int) -> str:
    """In words, what to set so that a training fits; "" where nothing of it would do."""
    alone = replace(tried, batch=0)
    microbatch = _largest(divisors, lambda one: replace(alone, microbatch=one), free)
    batch = _largest(range(1, asked.batch + 1), lambda one: replace(tried, microbatch=0, batch=one), free)
    if microbatch is None or (asked.batch and batch is None):
        return ""
    wanted = (
        ("runtime.loss_chunk", tried.rows, asked.rows),
        ("microbatch", microbatch, asked.microbatch),
        ("validation.batch", batch or 0, asked.batch),
    )
    return "set " + " and ".join(f"{name} to {now}" for name, now, before in wanted if now != before)


def _largest(sizes: range | list[int], of: Callable[[int], Load], free: int) -> int | None:
    """The largest of ascending sizes that fits."""
    return next((one for one in reversed(sizes) if INTERPRETER + of(one).total() <= free), None)


def _gib(size: int) -> str:
    return f"{math.ceil(size / 2**30 * 10) / 10:.1f} GiB"
