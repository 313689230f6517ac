"""How much of a card a pool takes, and how many learners fit: foretold from the model's sizes and the run's parameters,
by going through what its processes would take, in order. Nothing runs, and no card is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from coresident.engines.pool.fit import card, forward
from coresident.engines.pool.fit.architecture import Architecture
from coresident.engines.pool.fit.forward import Rows
from coresident.engines.pool.fit.heap import Heap
from coresident.engines.pool.fit.pack import Pack
from coresident.engines.pool.fit.plain_pack import PlainPack
from coresident.engines.pool.fit.step import Learner
from coresident.engines.pool.fit.together import as_they_are, together
from coresident.engines.pool.fit.trl_learner import TRLLearner

if TYPE_CHECKING:
    from coresident.engines.pool.parameters import DPO

ARMS = {"native": "none", "fork": "fork", "packed": "packed", "trl": "trl"}
CONTEXTS, ROUNDING = "contexts", "rounding"
PARTS = (CONTEXTS, *forward.KINDS, ROUNDING)
MOST = 1024
# What a pack of one learner more may take less of; that it takes less of anything else is rarer, and is not looked for.
SHRINKING = (forward.LOGITS, forward.TRANSIENTS, forward.WORKSPACES, ROUNDING)
# Steps before the capture, as `packed.captured` has them.
WARM = 2


@dataclass(frozen=True)
class Prediction:
    """Bytes of the whole card at its highest with so many learners, and what they are (`PARTS`): held when a process
    holds most, and `rounding` what its allocator has taken beyond that.
    """

    learners: int
    total: int
    parts: dict[str, int]


class Predictor:
    """For one run of `settings`, whatever its number of learners. `base` are the bytes that the base occupies, `rows` the
    batches of one or several learners; others are taken to be like these, in turn.
    """

    def __init__(
        self, settings: DPO, shape: Architecture, base: int, nf4: bool, rows: Sequence[Sequence[Rows]]
    ) -> None:
        self.settings, self.shape, self.base, self.nf4 = settings, shape, base, nf4
        self.rows = [list(one) for one in rows]
        self._process: Callable[[int], Heap] = cache(self._learner)

    def at(self, learners: int) -> Prediction:
        """With this many learners."""
        mps = self.settings.mps == "on"
        own = card.contexts(mps, self.settings.deterministic)
        if self.settings.sharing == "packed":
            heaps, contexts = self._pack(learners), card.PACK
        else:
            heaps = [self._process(number % len(self.rows)) for number in range(learners)]
            if self.settings.schedule == "solo":
                heaps = [max(heaps, key=lambda heap: heap.reserved)]
            contexts = len(heaps) * (own.learner if self.settings.sharing == "fork" else own.loading)
        parts: Counter[str] = Counter(dict.fromkeys(PARTS, 0))
        shared = self.settings.sharing in ("fork", "fork-copy")
        if shared:
            contexts += own.golden
            parts[forward.BASE] += self.base
        if mps:
            contexts += card.MPS_SERVER
        parts[CONTEXTS] += round(contexts)
        for heap in heaps:
            parts.update(heap.fullest)
            parts[ROUNDING] += heap.reserved - sum(heap.fullest.values())
        return Prediction(learners, sum(parts.values()), {name: parts[name] for name in PARTS})

    def largest(self, memory: int) -> tuple[int, tuple[int, ...]]:
        """The largest number of learners that fit into `memory` bytes, at most 1024 (0 where not even one does), and smaller ones
        that do not: a pack can take less with one learner more, where its logits are made in one piece more.
        """
        low, high = 0, 1
        while high <= MOST and self.at(high).total <= memory:
            low, high = high, 2 * high
        high = min(high, MOST + 1)
        while high - low > 1:
            middle = (low + high) // 2
            if self.at(middle).total <= memory:
                low = middle
            else:
                high = middle
        beyond: list[int] = []
        if self.settings.sharing == "packed":
            for more in range(low + 1, MOST + 1):
                found = self.at(more)
                if found.total - sum(found.parts[part] for part in SHRINKING) > memory:
                    break
                if found.total <= memory:
                    low = more
                else:
                    beyond.append(more)
        return low, tuple(number for number in beyond if number < low)

    def _learner(self, number: int) -> Heap:
        heap = Heap()
        kind = TRLLearner if self.settings.sharing == "trl" else Learner
        process = kind(self.shape, self.settings, self.nf4, heap)
        process.start(0 if self.settings.sharing == "fork" else self.base)
        rows = self.rows[number]
        if self.settings.loss == "dpo" and self.settings.reference == "precomputed":
            process.reference(max(rows, key=lambda one: one.tokens))
        for one in rows:
            process.step(one)
        return heap

    def _pack(self, learners: int) -> list[Heap]:
        if self.settings.step == "eager" or (self.settings.step == "auto" and self.shape.normed):
            # Queries and keys that are normalised are not of Llama's kind (`packed.layers`).
            heap = Heap()
            plain = PlainPack(self.shape, self.settings, self.nf4, learners, heap)
            plain.start(self.base)
            plain.steps(as_they_are(self.rows, learners, self.settings))
            return [heap]
        own, graphs = Heap(), Heap()
        process = Pack(self.shape, self.settings, self.nf4, learners, own, graphs)
        process.start(self.base)
        rows = together(self.rows, learners, self.settings)
        # Before a graph is captured the step runs twice in the graph's memory (`packed.captured`).
        for _ in range(WARM + 1):
            process.step(rows)
        process.finish()
        return [own, graphs]
