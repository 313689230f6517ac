"""Which preference pairs a learner trains on: its own shard, the same in every arm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.tokenized import Tokenized, tokenize
from coresident.errors import UserError
from coresident.text import arithmetic, preferences, pythondocs
from coresident.text.preferences import Pair

# The smolvm harness gives learner k the shard of seed 100 + k.
FIRST_SEED = 100


def files(parameters: DPO) -> tuple[Path, ...]:
    """The files that hold the pairs: one for all learners, or one for each. Raises `UserError` for another
    number.
    """
    named = parameters.data.files
    if named and len(named) not in (1, parameters.learners):
        raise UserError(
            f"data.files names {len(named)} files for {parameters.learners} learners",
            "give one file for all learners, or one for each",
        )
    return tuple(Path(name).expanduser().absolute() for name in named)


def pairs(parameters: DPO, learner: int) -> list[Pair]:
    """The pairs of learner `learner` (from 0)."""
    data = parameters.data
    if data.source == "files":
        named = files(parameters)
        return preferences.read(named[learner if len(named) > 1 else 0])
    seed = FIRST_SEED + learner
    if data.source == "arithmetic":
        return arithmetic.pairs(data.pairs, seed)
    return pythondocs.pairs(data.pairs, seed, length=parameters.max_length)


def tokens(parameters: DPO, learner: int, tokenizer: Any) -> Tokenized:
    """The same as token ids. Raises `UserError` naming the pair that `max_length` would leave without a
    completion.
    """
    return tokenize(pairs(parameters, learner), tokenizer, parameters)
