"""Arithmetic preference pairs made from a seed: short prompts, and nothing to download or to agree on."""

from __future__ import annotations

import operator
import random

from coresident.text.preferences import Pair

_OPERATIONS = (("+", operator.add, 999), ("-", operator.sub, 999), ("*", operator.mul, 99))
_SLIPS = (-10, -9, -3, -2, -1, 1, 2, 3, 9, 10)


def pairs(count: int, seed: int) -> list[Pair]:
    """`count` pairs of about twenty tokens: the right result is chosen, one that is off by a little is
    rejected.

    One seed gives one shard, in the same order everywhere; learner k takes seed 100 + k.
    """
    source = random.Random(f"arithmetic:{seed}")  # noqa: S311
    made = []
    for _ in range(count):
        symbol, apply, largest = source.choice(_OPERATIONS)
        left, right = source.randint(1, largest), source.randint(1, largest)
        result = apply(left, right)
        question = f"Compute {left} {symbol} {right}.\nResult:"
        made.append(Pair(question, f" {result}", f" {result + source.choice(_SLIPS)}"))
    return made
