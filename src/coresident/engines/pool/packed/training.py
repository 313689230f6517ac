"""A pack as a job describes it: its learners' data, where they start, and where their adapters are kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coresident.engines.pool.base import base, identity
from coresident.engines.pool.job import Job
from coresident.engines.pool.learning import adapter, data, outputs
from coresident.engines.pool.learning.tokenized import Tokenized, batches, planned
from coresident.engines.pool.packed import kinds
from coresident.engines.pool.packed.arena import draw
from coresident.engines.pool.packed.pack import Pack, Plan
from coresident.engines.pool.packed.policy import Policy
from coresident.engines.pool.parameters import DPO

if TYPE_CHECKING:
    from torch import Tensor, nn


def shards(settings: DPO, tokenizer: Any) -> list[Tokenized]:
    """Each learner's data."""
    return [data.tokens(settings.of(number), number, tokenizer) for number in range(settings.learners)]


def begin(job: Job, model: nn.Module, shards: Sequence[Tokenized]) -> Pack:
    """The pack over an attached model. Raises UserError for a base that cannot be packed, or an adapter to start from
    that belongs to something else.
    """
    settings = job.parameters
    policy = Policy(model)
    policy.check(max(settings.of(number).max_length for number in range(settings.learners)))
    origin = "" if settings.start_from is None else identity.of_base(base.read(Path(job.base)))
    known: dict[tuple[int, int], dict[str, Tensor]] = {}
    plans = []
    for number, shard in enumerate(shards):
        own = settings.of(number)
        if settings.start_from is not None:
            outputs.check_start(own, origin)
            start = adapter.read(Path(settings.start_from))
        else:
            start = known.setdefault((own.rank, own.seed), {}) or draw(policy.layers, own.rank, own.seed)
            known[own.rank, own.seed] = start
        plans.append(Plan(own, planned(shard, own), batches(shard, own, number), start))
    return Pack(policy, plans, kind=kinds.chosen(policy, settings.step))


def export(job: Job, pack: Pack, number: int, described: str) -> str:
    """Write what a learner learned; of one that stopped, the last adapter that was good, beside. Returns its digest."""
    work = Path(job.work)
    if number not in pack.failed:
        return adapter.write(pack.finished[number], described, work / f"learner-{number}")
    told = {"steps": len(pack.series[number]["loss"])}
    return adapter.write(
        pack.finished[number], described, outputs.last_good(work, number), told, replace=True
    )
