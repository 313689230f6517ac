"""The plain version: the whole model resident, no cache of keys, no slots, one expert after another. What all else must equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from coresident.engines.moe.decoder import blocks
from coresident.engines.moe.layout.record import RecordFormat, Weights, swiglu
from coresident.engines.moe.models.dense import Dense
from coresident.engines.moe.models.origins import Origin


@dataclass(frozen=True)
class Oracle:
    """Weights in `dtype` where `dense` lies; experts as a record of `form` would hold them (4-bit ones rounded so)."""

    origin: Origin
    dense: Dense
    experts: tuple[tuple[Weights, ...], ...]

    def logits(self, tokens: Tensor) -> Tensor:
        """Scores after each of `tokens` [T]: [T, V]."""
        found, dense = self.origin.architecture, self.dense
        positions = torch.arange(len(tokens), device=tokens.device)
        x = F.embedding(tokens, dense.embedding)
        mixture = 0
        for layer in dense.layers:
            normed = blocks.rms_norm(x, layer.attention_norm, found.eps)
            query, key, value = (
                each.transpose(0, 1)[None] for each in blocks.project(found, dense, layer, normed, positions)
            )
            mixed = blocks.attend(query, key, value, None)[0].transpose(0, 1).flatten(1)
            x = x + F.linear(mixed, layer.out)
            normed = blocks.rms_norm(x, layer.feedforward_norm, found.eps)
            if layer.router is None:
                x = x + blocks.feed_forward(layer, normed)
            else:
                x = x + self._mixture(
                    mixture, normed, *blocks.route(found, blocks.router_logits(layer, normed))
                )
                mixture += 1
        return F.linear(blocks.rms_norm(x, dense.norm, found.eps), dense.output)

    def _mixture(self, layer: int, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, matrices in enumerate(self.experts[layer]):
            rows, places = torch.where(chosen == expert)
            out.index_add_(0, rows, swiglu(x[rows], matrices).float() * weights[rows, places, None])
        return out.to(x.dtype)


def oracle(origin: Origin, form: RecordFormat, dense: Dense) -> Oracle:
    """The whole of the origin's model, on the device and in the dtype of `dense`."""
    device, dtype = dense.embedding.device, dense.embedding.dtype

    def weights(layer: int, expert: int) -> Weights:
        record = form.encode(*origin.expert(layer, expert))
        found = form.stored(record[None]).expert(0, dtype)
        return Weights(found.gate_up.to(device), found.down.to(device))

    experts = tuple(
        tuple(weights(layer, expert) for expert in range(origin.experts)) for layer in range(origin.layers)
    )
    return Oracle(origin, dense, experts)
