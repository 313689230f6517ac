"""Decoding on a card: a step's kernels captured as CUDA graphs, cut where the host must bring experts in.

A layer whose experts are all resident needs no cut, so a model with all of them is one graph a token. Elsewhere a graph ends
with the router's decision on its way to the host; the host brings in what is missing and starts the next graph, which begins
with the experts. What a hit costs the policy is booked after that start, while the device is busy. Where every expert is in
pinned memory, kernels do all of that (`residency.unattended`), and a token is one graph whatever is resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from coresident.engines.moe import budget
from coresident.engines.moe.decoder.decoder import Decoder, State
from coresident.engines.moe.decoder.program import Buffers, Program
from coresident.engines.moe.residency import unattended
from coresident.engines.moe.residency.clock import LAUNCH, POLICY, WAIT
from coresident.engines.moe.residency.unattended import Unattended
from coresident.engines.moe.tiers.host import Arena
from coresident.errors import UserError


@dataclass
class FusedDecoder(Decoder):
    """`Decoder` whose steps are fused; prefill is the plain one, over the same slots. `fills`: who brings in what is missing."""

    fills: Literal["auto", "host", "device"] = "auto"
    _programs: dict[int, Program] = field(init=False, default_factory=dict)
    # On the host, so that no step waits to know whether it is beyond the context.
    _lengths: list[int] = field(init=False, default_factory=list)
    _whole: State | None = field(init=False, default=None)
    _over: torch.cuda.Event | None = field(init=False, default=None)
    _unattended: Unattended | None = field(init=False, default=None)
    # Whether the device's books, and the host's, tell the state after the last step.
    _taken: bool = field(init=False, default=False)
    _settled: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        if self.watch is not None:
            raise UserError("fused kernels show no router decisions", "set kernels: plain")
        if self.device.type == "cuda":
            self._over = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def filled_by(self) -> str:
        return "device" if self._taken else "host"

    @torch.inference_mode()
    def warm(self, batch: int) -> None:
        """Compile and capture the step of `batch` rows. What was decoded before is forgotten."""
        self.state = self._fresh([1] * batch)
        if batch not in self._programs:
            self._programs[batch] = self._captured(batch)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """One more token for each row; the scores are overwritten by the next step."""
        self._running()
        if max(self._lengths) >= self.context:
            raise UserError(
                f"a text of {max(self._lengths) + 1} tokens is beyond the context of {self.context}",
                "ask for fewer tokens, or give a shorter prompt",
            )
        program = self._programs.get(len(tokens))
        if program is None:
            program = self._programs[len(tokens)] = self._captured(len(tokens))
        clock, cache = self.experts.clock, self.experts.cache
        self._hand_over(program)
        program.buffers.tokens.copy_(tokens)
        booked: tuple[int, list[int]] | None = None
        for segment in program.segments:
            with clock(LAUNCH):
                segment.run()
                if self._over is not None:
                    self._over.record()
            if booked is not None:
                with clock(POLICY):
                    cache.step(*booked)
            booked = None if segment.cut is None else self._serve(program, segment.cut)
        if len(tokens) == 1:
            # Layers without a cut are not asked; one row's experts are distinct.
            for layer in program.complete:
                cache.decoded[layer].add(self.architecture.top_k, self.architecture.top_k)
        self._lengths = [length + 1 for length in self._lengths]
        return program.buffers.logits

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], every: bool = False) -> Tensor:
        """`Decoder.prefill`: the host brings in what it needs."""
        self.settle()
        self._taken = False
        return super().prefill(prompts, every)

    @torch.inference_mode()
    def settle(self) -> None:
        """Bring the cache's books on the host up to date; waits for the steps issued."""
        if not self._settled and self._unattended is not None:
            self._unattended.settle()
        self._settled = True

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only. They move to the front of the same memory, which graphs point to."""
        state = self._running()
        index = torch.tensor(rows, device=self.device)
        for whole in (state.keys, state.values):
            whole[:, : len(rows)] = whole[:, index]
        state.lengths[: len(rows)] = state.lengths[index]
        self._lengths = [self._lengths[row] for row in rows]
        self.state = self._front(len(rows))

    def _fresh(self, lengths: Sequence[int]) -> State:
        if self._whole is None or self._whole.keys.shape[1] < len(lengths):
            self._programs.clear()
            self._whole = super()._fresh(lengths)
        self._lengths = list(lengths)
        self._whole.lengths[: len(lengths)] = torch.tensor(lengths, device=self.device)
        return self._front(len(lengths))

    def _front(self, rows: int) -> State:
        assert self._whole is not None
        whole = self._whole
        return State(whole.keys[:, :rows], whole.values[:, :rows], whole.lengths[:rows])

    def _hand_over(self, program: Program) -> None:
        """Whoever brings in this step's experts gets the books."""
        if program.unattended is None:
            self.settle()
            self._taken = False
            self.experts.slots.show()
            return
        if not self._taken:
            program.unattended.take()
            self._taken = True
        self._settled = False

    def _serve(self, program: Program, layer: int) -> tuple[int, list[int]] | None:
        """Bring in what the decision needs. Returns what is still to be booked: a step that hit everything."""
        experts = self.experts
        with experts.clock(WAIT):
            if self._over is not None:
                self._over.synchronize()
        needed = sorted(set(program.buffers.decision.tolist()))
        if experts.cache.resident[layer].issuperset(needed):
            experts.slots.wait_for(layer, needed)
            return layer, needed
        # The host has waited for a later point of the stream than any kernel that read these slots: they are free to fill,
        # and the map's row is free to write. Not so between the waves of one layer.
        waves = experts.bring(layer, needed, prefill=False, show=True)
        wave = next(waves)
        capacity = experts.cache.capacities[layer]
        for _ in range(capacity, len(needed), capacity):
            self._between(program, layer, wave)
            wave = next(waves)
        experts.slots.wait_for(layer, wave)
        return None

    def _between(self, program: Program, layer: int, wave: Sequence[int]) -> None:
        """Run the experts that are here before the next ones take their slots."""
        self.experts.slots.wait_for(layer, wave)
        program.experts(layer)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _captured(self, batch: int) -> Program:
        state, cache = self._running(), self.experts.cache
        complete = [layer for layer, held in enumerate(cache.resident) if len(held) == cache.experts]
        buffers = Buffers(self.architecture, batch, self.device, self.dense.embedding.dtype)
        program = Program(
            self.architecture, self.dense, self.experts.slots, state, self.replay, complete, buffers,
            self._attendant(len(buffers.chosen), complete),
        )  # fmt: skip
        if self.device.type == "cuda":
            lengths = state.lengths.clone()
            try:
                self._capture(program)
            finally:
                state.lengths.copy_(lengths)
        return program

    def _attendant(self, pairs: int, complete: Sequence[int]) -> Unattended | None:
        """Kernels that bring experts in, for steps of `pairs` (row, expert), if they can and may; None: the host does."""
        experts, host = self.experts, self.experts.host
        layers = [layer for layer in range(len(experts.cache.capacities)) if layer not in complete]
        if self.fills == "host" or not layers:
            return None
        possible = unattended.possible(experts.cache.policy, host, self.device)
        if self.fills == "device":
            budget.require_a_step(experts.cache.capacities, experts.cache.experts, pairs)
            if not possible:
                raise UserError(
                    "kernels bring experts in from pinned memory only, and this is not", "set fills: auto"
                )
        least = min(experts.cache.capacities[layer] for layer in layers)
        if not possible or min(pairs, experts.cache.experts) > least:
            return None
        if self._unattended is None:
            assert isinstance(host, Arena)
            self._unattended = Unattended(experts.cache, experts.slots, host, layers)
        return self._unattended

    def _capture(self, program: Program) -> None:
        if program.unattended is not None:
            program.unattended.sleep()
        try:
            self._record(program)
        finally:
            # Other programs' steps count, also where this one could not be had.
            if program.unattended is not None:
                program.unattended.wake()
        torch.cuda.synchronize(self.device)

    def _record(self, program: Program) -> None:
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(side):
                # Compiles kernels and makes workspaces, none of which a capture may do. What it writes, the step writes again.
                for segment in program.segments:
                    segment.run()
        finally:
            # Also what was issued before one could not be had: it is not to see that residency is awake again.
            side.synchronize()
        pool = None
        for segment in program.segments:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=side):
                segment.run()
            pool = graph.pool()
            segment.graph = graph
