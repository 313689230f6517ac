"""What can be said about a pool run before it starts: that its input is good, and what it needs of the
machine.

Nothing is written here. Cells of one study mostly share base and data, so each combination is looked at once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from coresident.engines.pool.base import base, shapes
from coresident.engines.pool.base.loading import check_mappable
from coresident.engines.pool.card import device_rules
from coresident.engines.pool.learning import data
from coresident.engines.pool.parameters import DPO
from coresident.workload import Needs

MIB = 2**20
# Measured with torch 2.13 on a CPU, rounded down, since needs are a lower bound: an interpreter with
# everything imported, the same in anonymous memory alone (its file pages are shared between interpreters),
# and what a forked learner adds.
INTERPRETER = 250 * MIB
FURTHER_INTERPRETER = 200 * MIB
FORKED = 40 * MIB


def inspect(parameters: DPO) -> Needs:
    """Check base, data and tokens, and say what the run needs. Raises `UserError` for bad input."""
    device_rules.check(parameters)
    size = _base_size(parameters)
    _check_data(parameters)
    together = 1 if parameters.schedule == "solo" else parameters.learners
    bases = {"none": together, "fork-copy": together + 1}.get(parameters.sharing, 1)
    if parameters.sharing in ("fork", "fork-copy"):
        processes = INTERPRETER + together * FORKED
    else:
        processes = INTERPRETER + (together - 1) * FURTHER_INTERPRETER
    inputs = [*data.files(parameters)]
    if parameters.base.path is not None:
        where = base.location(parameters.base, parameters.dtype)
        # The weights' own content is covered by the checksum that every cell reports as a digest.
        inputs += [file for name in ("config.json", "tokenizer.json") if (file := where / name).is_file()]
    return Needs(
        workers=together,
        cpus_per_worker=parameters.cpus,
        memory=bases * size + processes,
        on_card=bases * size,
        inputs=tuple(inputs),
    )


def _base_size(parameters: DPO) -> int:
    where = base.location(parameters.base, parameters.dtype)
    if parameters.base.config is not None and not where.is_dir():
        return base.estimate(parameters.base, parameters.dtype)
    directory = base.read(where)
    if parameters.sharing == "mapped":
        check_mappable(directory, parameters.dtype)
    return directory.bytes(parameters.dtype)


def _check_data(parameters: DPO) -> None:
    named = data.files(parameters)
    if parameters.data.source == "python-docs":
        # Made so that every prompt leaves a completion, whatever the tokenizer.
        return
    shards = len(named) if named else parameters.learners
    for learner in range(shards):
        only = parameters.model_dump(include={"base", "dtype", "data", "loss", "max_length"})
        _check_shard(DPO.model_validate({**only, "learners": shards}), learner)


@cache
def _check_shard(parameters: DPO, learner: int) -> None:
    """Tokenise one learner's shard; `parameters` differ from others' in nothing that it does not depend on."""
    with _tokenizer(parameters) as tokenizer:
        data.tokens(parameters, learner, tokenizer)


@contextmanager
def _tokenizer(parameters: DPO) -> Iterator[Any]:
    """The base's tokenizer; for a named base that is not written yet, the one it will get."""
    from coresident.engines.pool.base.writer import write_tokenizer
    from coresident.text import tokenizer

    where = base.location(parameters.base, parameters.dtype)
    if parameters.base.config is None or where.is_dir():
        yield tokenizer.load(where)
        return
    with tempfile.TemporaryDirectory() as aside:
        write_tokenizer(shapes.TOKENS.get(parameters.base.config, shapes.TOKENS_OTHERWISE), Path(aside))
        yield tokenizer.load(Path(aside))
