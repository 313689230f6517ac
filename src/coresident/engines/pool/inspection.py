"""What can be said about a pool run before it starts: that its input is good, and what it needs of the
machine.

Nothing is written here. Cells of one study mostly share base and data, so each combination is looked at once.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from coresident.engines.pool.base import base, limits, shapes
from coresident.engines.pool.base.loading import check_mappable
from coresident.engines.pool.card import device_rules
from coresident.engines.pool.learning import data
from coresident.engines.pool.packed import rules as packed_rules
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.peers import rules
from coresident.engines.pool.peers.smolvm import prerequisites
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
    rules.check(parameters)
    packed_rules.check(parameters)
    if parameters.sharing == "smolvm":
        # Its machines have cores and memory of their own, of which nothing is known before they run.
        found = prerequisites.of(parameters)
        return Needs(workers=parameters.learners, inputs=(found.binary, found.workload))
    size = _base_size(parameters)
    limits.check(parameters)
    _check_data(parameters)
    together = parameters.at_once
    bases = {"none": together, "fork-copy": together + 1}.get(parameters.sharing, 1)
    if parameters.sharing in ("fork", "fork-copy"):
        processes = INTERPRETER + together * FORKED
    else:
        processes = INTERPRETER + (together - 1) * FURTHER_INTERPRETER
    on_card = together if parameters.sharing == "trl" else bases
    inputs = [*data.files(parameters)]
    if parameters.base.path is not None:
        where = base.source(parameters.base, parameters.dtype)
        # The weights' own content is covered by the checksum that every cell reports as a digest.
        inputs += [file for name in ("config.json", "tokenizer.json") if (file := where / name).is_file()]
    return Needs(
        workers=together,
        cpus_per_worker=parameters.cpus,
        memory=bases * size + processes,
        on_card=on_card * size,
        inputs=tuple(inputs),
    )


def _base_size(parameters: DPO) -> int:
    where = base.source(parameters.base, parameters.dtype)
    if parameters.sharing == "mapped" and where.is_dir():
        check_mappable(base.read(where), parameters.dtype)
    return base.estimate(parameters.base, parameters.dtype)


def _check_data(parameters: DPO) -> None:
    for learner in range(len(parameters.eval_files)):
        data.held_out(parameters, learner, tokenizer_of(parameters))
    named = data.files(parameters)
    if parameters.data.source == "python-docs":
        # Made so that every prompt leaves a completion, whatever the tokenizer.
        return
    shards = len(named) if named else parameters.learners
    only = parameters.model_dump(include={"base", "dtype", "data", "loss", "max_length"})
    _check_shards(DPO.model_validate({**only, "learners": shards}))


@cache
def _check_shards(parameters: DPO) -> None:
    """Tokenise every learner's shard; `parameters` differ from others' in nothing that it does not depend on."""
    tokenizer = tokenizer_of(parameters)
    for learner in range(parameters.learners):
        data.tokens(parameters, learner, tokenizer)


def tokenizer_of(parameters: DPO) -> Any:
    """The base's tokenizer; for a named base that is not written yet, the one it will get."""
    from coresident.text import tokenizer

    where = base.source(parameters.base, parameters.dtype)
    if where.is_dir():
        return tokenizer.load(where)
    return _to_be(shapes.TOKENS.get(parameters.base.config or "", shapes.TOKENS_OTHERWISE))


@cache
def _to_be(tokens: int) -> Any:
    from coresident.engines.pool.base.writer import write_tokenizer
    from coresident.text import tokenizer

    with tempfile.TemporaryDirectory() as aside:
        write_tokenizer(tokens, Path(aside))
        return tokenizer.load(Path(aside))
