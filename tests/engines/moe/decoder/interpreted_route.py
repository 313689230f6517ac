"""Run by `test_fused.py` in a process of its own, where Triton interprets kernels on the CPU.

Routes rows of scores some of which are no numbers, for models with as many experts as a kernel's block and with fewer; then
generates from a router of such weights. Prints a line of JSON: what was chosen, with what weights, and what was said.
"""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import torch

from coresident.engines.moe import assemble
from coresident.engines.moe.decoder import blocks, launches
from coresident.engines.moe.decoder.fused import FusedDecoder
from coresident.engines.moe.generate import generate
from coresident.engines.moe.models.architecture import Architecture
from coresident.engines.moe.models.origins import Drawn
from coresident.engines.moe.parameters import Decode
from coresident.errors import UserError

BAD = ((math.nan, 0), (math.nan, 3), (math.inf, 1), (-math.inf, None), (math.nan, None))


def shape(experts: int, normalise: bool) -> Architecture:
    """A model of two layers."""
    return Architecture(
        kind="olmoe", heads=1, kv_heads=1, head_width=8, dense_width=0, sparse=(True, True), normalise=normalise,
        qk_norm="full", clip=None, vocabulary=16, width=8, experts=experts, top_k=2, expert_width=8, eps=1e-5, theta=1e4,
        context=32, tied=False,
    )  # fmt: skip


def routed(found: Architecture) -> dict[str, Any]:
    """The last two rows are numbers: ties, and a score that is minus infinity."""
    scores = torch.randn(len(BAD) + 2, found.experts, generator=torch.Generator().manual_seed(0))
    for row, (value, place) in enumerate(BAD):
        scores[row, slice(None) if place is None else place] = value
    scores[-2, 1:4], scores[-1, 0] = 3.0, -math.inf
    chosen, weights = torch.full((2 * len(scores),), -1, dtype=torch.int32), torch.zeros(2 * len(scores))
    launches.route(found, scores, chosen, weights)
    wanted = blocks.route(found, scores[-2:])
    return {
        "experts": found.experts,
        "chosen": [chosen.min().item(), chosen.max().item()],
        "numbers": weights.view(-1, 2)[: len(BAD)].isnan().logical_not().sum().item(),
        "ties": chosen.view(-1, 2)[-2].tolist(),
        "last": chosen.view(-1, 2)[-1].tolist() == wanted[0][-1].tolist(),
        "weights": (weights.view(-1, 2)[-2:] - wanted[1]).abs().max().item(),
    }


def said(fills: str, slots: int) -> str:
    """What generating with a damaged router says."""
    assemble._decoder_kind = lambda *_: partial(FusedDecoder, fills=fills)
    asked = Decode.model_validate({"model": {"config": "tiny"}, "slots": slots})
    engine = assemble.build(asked, Drawn(shape(8, False), 1, "F32"), torch.device("cpu"), 16, 1)
    try:
        # A prompt is read well; the first step is not.
        engine.decoder.prefill([[1, 2]])
        router = engine.decoder.dense.layers[0].router
        assert router is not None
        router[3] = math.nan
        engine.decoder.prefill = lambda *_: torch.zeros(1, 16)  # type: ignore[method-assign]
        generate(engine.decoder, [[1, 2]], 4)
    except (UserError, LookupError) as error:
        return str(error)
    return "nothing"


def main() -> None:
    """Route and generate."""
    torch.set_num_threads(1)
    kinds = [shape(experts, normalise) for experts in (5, 8) for normalise in (False, True)]
    told = {"routed": [routed(one) for one in kinds]}
    print(json.dumps(told | {"said": [said("host", 3), said("device", 3), said("host", 8)]}))


main()
