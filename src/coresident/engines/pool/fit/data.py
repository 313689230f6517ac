"""How long the rows of a run are: looked up in its data where it names any, else all as long as they may be."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from coresident.engines.pool.fit.forward import Rows

if TYPE_CHECKING:
    from coresident.engines.pool.parameters import DPO

# Learners whose data are looked at, and each one's first steps; of the steps after them the largest batches count.
LEARNERS, STEPS = 16, 6


def full(settings: DPO, width: int) -> list[Rows]:
    """Batches whose rows are all `width` tokens long and predicted from the second token on: two, since at the first there
    are no moments yet.
    """
    sequences = settings.batch * (2 if settings.loss == "dpo" else 1)
    return [Rows(sequences, width, sequences * (width - 1))] * min(settings.steps, 2)


def looked_up(settings: DPO) -> list[list[Rows]]:
    """The batches of the first learners, as they come: a few steps and, of a longer run, then the largest and the one with most
    predicted. Of a run that is over by then there is no more: at one more step it would find another heap, and might
    reserve what it never does. Tokenises their data.
    """
    from coresident.engines.pool.inspection import tokenizer_of
    from coresident.engines.pool.learning import data
    from coresident.engines.pool.learning.tokenized import batches, planned

    found = []
    tokenizer = tokenizer_of(settings)
    for learner in range(min(settings.learners, LEARNERS)):
        shard = data.tokens(settings, learner, tokenizer)
        steps = planned(shard, settings)
        # A pass or two show how large a batch gets.
        most = min(steps, 2 * -(-len(shard.pairs) // settings.batch))
        all_rows = []
        for batch in islice(batches(shard, settings, learner), most):
            sequences, width = batch.input_ids.shape
            all_rows.append(Rows(sequences, width, len(batch.labels), sequences * width - batch.tokens))
        largest = max(all_rows, key=lambda rows: (rows.tokens, rows.scored))
        busiest = max(all_rows, key=lambda rows: rows.scored)
        first = all_rows[:STEPS]
        found.append([*first, largest, busiest] if steps > len(first) else first)
    return found
