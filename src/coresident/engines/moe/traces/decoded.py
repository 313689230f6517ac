"""Routing as our own decoder does it, with every expert resident: what it watches while it generates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from coresident.engines.moe import assemble
from coresident.engines.moe.models.checkpoint import Checkpoint
from coresident.engines.moe.parameters import Decode, Model
from coresident.engines.moe.traces.manifest import Sampling
from coresident.engines.moe.traces.routed import Generate, Routed, drawn


@contextlib.contextmanager
def generating(
    checkpoint: Checkpoint, device: torch.device, sampling: Sampling, longest: int, batch: int
) -> Iterator[Generate]:
    """The decoder, built once for `batch` prompts of at most `longest` tokens; tokens that end a text are never drawn."""
    seen: list[tuple[Tensor, Tensor]] = []

    def watch(_: int, logits: Tensor, chosen: Tensor) -> None:
        seen.append((logits.float().cpu().clone(), chosen.cpu().clone()))

    path = str(checkpoint.path)
    kind: Literal["float32", "auto"] = "float32" if checkpoint.expert_dtype == "F32" else "auto"
    asked = Decode(model=Model(path=path), tokens=sampling.max_tokens, dtype=kind, kernels="plain")
    origin = assemble.open_model(asked.model)
    context = longest + sampling.max_tokens
    engine = assemble.build(asked, origin, device, context, batch, watch=watch)
    ends = checkpoint.architecture.ends

    def generate(prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling) -> list[Routed]:
        sources = [torch.Generator().manual_seed(seed) for seed in seeds]
        passed, parts = [torch.tensor(prompts)], []
        told = engine.decoder.prefill(prompts)
        parts.append(_taken(seen, len(prompts)))
        for _ in range(sampling.max_tokens - 1):
            following = drawn(told.float().cpu(), sources, sampling.temperature, ends)
            passed.append(following[:, None])
            told = engine.decoder.step(following.to(engine.decoder.device))
            parts.append(_taken(seen, len(prompts)))
        tokens = torch.cat(passed, dim=1).to(torch.int32).numpy()
        logits, experts = (torch.cat(part, dim=1).numpy() for part in zip(*parts, strict=True))
        nothing = np.zeros((tokens.shape[1], 0, logits.shape[2], 0), np.int64)
        return [Routed(tokens[i], logits[i], experts[i], nothing) for i in range(len(prompts))]

    try:
        yield generate
    finally:
        engine.close()


def _taken(seen: list[tuple[Tensor, Tensor]], batch: int) -> tuple[Tensor, Tensor]:
    """[batch, T, L, N] logits and [batch, T, L, k] experts of the last pass, which is forgotten."""
    logits, experts = (torch.stack(part, 1) for part in zip(*seen, strict=True))
    seen.clear()
    return logits.view(batch, -1, *logits.shape[1:]), experts.view(batch, -1, *experts.shape[1:])
