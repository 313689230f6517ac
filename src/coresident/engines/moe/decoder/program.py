"""One step as a program: kernels over buffers that stay where they are, cut where the host must bring experts in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from coresident.engines.moe.decoder import launches
from coresident.engines.moe.decoder.blocks import feed_forward
from coresident.engines.moe.decoder.decoder import Replay, State
from coresident.engines.moe.models.architecture import Architecture
from coresident.engines.moe.models.dense import Dense, Layer
from coresident.engines.moe.residency.slots import Slots
from coresident.engines.moe.residency.unattended import Unattended

Operation = Callable[[], object]


@dataclass
class Segment:
    """Kernels that run without the host; then the host serves the mixture layer `cut` (None: the step is over)."""

    operations: list[Operation] = field(default_factory=list)
    cut: int | None = None
    graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """Start the kernels."""
        if self.graph is not None:
            self.graph.replay()
            return
        for operation in self.operations:
            operation()


class Buffers:
    """Everything that kernels of a step of `batch` rows read and write besides weights, keys and values."""

    def __init__(self, found: Architecture, batch: int, device: torch.device, kind: torch.dtype) -> None:
        pairs, exact = batch * found.top_k, torch.float32

        def room(*size: int, dtype: torch.dtype = kind) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.tokens = room(batch, dtype=torch.int64)
        self.texts = torch.arange(batch, device=device)
        self.residual, self.normed, self.delta = (room(batch, found.width) for _ in range(3))
        self.query, self.mixed = (room(batch, found.heads * found.head_width) for _ in range(2))
        self.scores = room(batch, found.experts, dtype=exact)
        self.chosen, self.weights = room(pairs, dtype=torch.int32), room(pairs, dtype=exact)
        self.inner, self.out = (
            room(pairs, found.expert_width, dtype=exact),
            room(pairs, found.width, dtype=exact),
        )
        self.logits = room(batch, found.vocabulary)
        # Where the host reads a router's decision.
        self.decision = torch.zeros(pairs, dtype=torch.int32, pin_memory=device.type == "cuda")


@dataclass
class Program:
    """`complete` are the mixture layers of which every expert is resident: those are never cut at. With `unattended` none is."""

    architecture: Architecture
    dense: Dense
    slots: Slots
    state: State
    replay: Replay | None
    complete: Sequence[int]
    buffers: Buffers
    unattended: Unattended | None = None
    segments: list[Segment] = field(default_factory=lambda: [Segment()])

    def __post_init__(self) -> None:
        self._then(self._embed)
        pending, mixture = self._norm_only, 0
        for number, layer in enumerate(self.dense.layers):
            self._then(partial(pending, layer.attention_norm))
            self._then(partial(self._attention, number, layer))
            self._then(partial(self._norm_delta, layer.feedforward_norm))
            if layer.router is None:
                self._then(partial(self._dense, layer))
                pending = self._norm_delta
                continue
            self._then(partial(self._route, mixture, layer.router))
            if mixture not in self.complete and self.unattended is not None:
                self._then(partial(self.unattended.step, mixture, self.buffers.chosen))
            elif mixture not in self.complete:
                self._then(self._tell)
                self.segments[-1].cut = mixture
                self.segments.append(Segment())
            self._then(partial(self.experts, mixture))
            pending = self._norm_experts
            mixture += 1
        self._then(partial(pending, self.dense.norm))
        self._then(self._finish)

    def experts(self, mixture: int) -> None:
        """Run those of the last decision's experts that have a slot."""
        held = self.buffers
        launches.experts(
            self.architecture, self.slots, mixture, held.normed, held.chosen, held.inner, held.out
        )

    def _then(self, operation: Operation) -> None:
        self.segments[-1].operations.append(operation)

    def _embed(self) -> None:
        self.buffers.residual.copy_(F.embedding(self.buffers.tokens, self.dense.embedding))

    def _norm_only(self, weight: Tensor) -> None:
        held = self.buffers
        launches.add_norm(self.architecture, held.residual, held.delta, None, weight, held.normed, 0)

    def _norm_delta(self, weight: Tensor) -> None:
        held = self.buffers
        launches.add_norm(self.architecture, held.residual, held.delta, None, weight, held.normed, 1)

    def _norm_experts(self, weight: Tensor) -> None:
        held, top_k = self.buffers, self.architecture.top_k
        launches.add_norm(
            self.architecture, held.residual, held.out, held.weights, weight, held.normed, top_k
        )

    def _attention(self, number: int, layer: Layer) -> None:
        held, state = self.buffers, self.state
        keys, values = state.keys[number], state.values[number]
        qkv = F.linear(held.normed, layer.qkv)
        launches.finish_qkv(
            self.architecture, self.dense, layer, qkv, state.lengths, held.query, keys, values
        )
        launches.attend(self.architecture, held.query, keys, values, state.lengths, held.mixed)
        torch.mm(held.mixed, layer.out.T, out=held.delta)

    def _route(self, mixture: int, router: Tensor) -> None:
        held = self.buffers
        if self.replay is None:
            torch.mm(held.normed.float(), router.T, out=held.scores)
        else:
            held.scores.copy_(self.replay(mixture, held.texts, self.state.lengths))
        launches.route(self.architecture, held.scores, held.chosen, held.weights)

    def _tell(self) -> None:
        self.buffers.decision.copy_(self.buffers.chosen, non_blocking=True)

    def _dense(self, layer: Layer) -> None:
        self.buffers.delta.copy_(feed_forward(layer, self.buffers.normed))

    def _finish(self) -> None:
        torch.mm(self.buffers.normed, self.dense.output.T, out=self.buffers.logits)
        self.state.lengths.add_(1)
