"""What a learner trains on: its own shard, the same in every arm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.tokenized import Tokenized, tokenize
from coresident.errors import UserError
from coresident.text import arithmetic, preferences, pythondocs, samples
from coresident.text.preferences import Pair
from coresident.text.samples import Sample

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


def items(parameters: DPO, learner: int) -> Sequence[Pair | Sample]:
    """What learner `learner` (from 0) learns: pairs, or for the loss `sft` samples (of made pairs, the chosen side)."""
    data = parameters.data
    imitates = parameters.loss == "sft"
    if data.source == "files":
        named = files(parameters)
        return read(parameters, named[learner if len(named) > 1 else 0])
    seed = FIRST_SEED + learner
    if data.source == "arithmetic":
        made = arithmetic.pairs(data.pairs, seed)
    else:
        made = pythondocs.pairs(data.pairs, seed, parameters.max_length, data.fill)
    return [Sample(pair.prompt, pair.chosen) for pair in made] if imitates else made


def tokens(parameters: DPO, learner: int, tokenizer: Any) -> Tokenized:
    """The same as token ids. Raises `UserError` naming the pair that `max_length` would leave without a
    completion, or that does not fill it although it should.
    """
    tokenized = tokenize(items(parameters, learner), tokenizer, parameters)
    if parameters.data.fill:
        for number, pair in enumerate(tokenized.pairs, start=1):
            shortest = len(pair.prompt) + min(map(len, pair.completions))
            if shortest < parameters.max_length:
                raise UserError(
                    f"data.fill: a sequence of pair {number} has {shortest} of {parameters.max_length} tokens in this"
                    " base's tokenizer",
                    "leave fill out, or use a base with another tokenizer",
                )
    return tokenized


def held_out(parameters: DPO, learner: int, tokenizer: Any) -> Tokenized | None:
    """What learner `learner` is evaluated on, or nothing."""
    named = parameters.eval_files
    if not named:
        return None
    if len(named) not in (1, parameters.learners):
        raise UserError(
            f"eval_files names {len(named)} files for {parameters.learners} learners",
            "give one file for all learners, or one for each",
        )
    file = Path(named[learner if len(named) > 1 else 0]).expanduser().absolute()
    return tokenize(read(parameters, file), tokenizer, parameters)


def read(parameters: DPO, file: Path) -> Sequence[Pair | Sample]:
    """A file's pairs, or for the loss `sft` its samples."""
    return samples.read(file) if parameters.loss == "sft" else preferences.read(file)
