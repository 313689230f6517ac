"""What a learner trains on: its own shard, the same in every arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coresident.engines.pool.learning.tokenized import Item, Tokenized, tokenize
from coresident.engines.pool.parameters import DPO
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
    completion; with `fill`, where too few pairs fill it.
    """
    if not parameters.data.fill:
        return tokenize(items(parameters, learner), tokenizer, parameters)
    # How many characters a token takes is the tokenizer's affair: of twice as many pairs, those that fill are kept.
    wanted = parameters.data.pairs
    more = parameters.model_copy(update={"data": parameters.data.model_copy(update={"pairs": 2 * wanted})})
    tokenized = tokenize(items(more, learner), tokenizer, parameters)
    full = [one for one in tokenized.pairs if _shortest(one) >= parameters.max_length]
    if len(full) < wanted:
        raise UserError(
            f"data.fill: {len(full)} of {2 * wanted} pairs reach {parameters.max_length} tokens in this base's tokenizer,"
            f" and {wanted} are needed",
            "leave fill out, ask for fewer pairs, or use a base with another tokenizer",
        )
    return replace(tokenized, pairs=tuple(full[:wanted]))


def _shortest(item: Item) -> int:
    return len(item.prompt) + min(map(len, item.completions))


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
