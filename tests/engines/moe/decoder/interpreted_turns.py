"""Run by `test_fused.py` in a process of its own, where Triton interprets kernels on the CPU.

Two decoders of a tiny model do the same, one filled by the host alone, the other by kernels where they can: rows leave a batch
until kernels can, prompts are read between, and a batch too wide for kernels follows. Prints a line of JSON: who
brought experts in at each step, and what differs.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch

from coresident.engines.moe import assemble, measured
from coresident.engines.moe.assemble import Engine
from coresident.engines.moe.decoder.fused import FusedDecoder
from coresident.engines.moe.generate import generate
from coresident.engines.moe.models.architecture import Architecture
from coresident.engines.moe.models.origins import Drawn
from coresident.engines.moe.parameters import Decode
from coresident.engines.moe.prompts import Prompted

SHAPE = Architecture(
    kind="olmoe", heads=1, kv_heads=1, head_width=8, dense_width=0, sparse=(True, True, True), normalise=False,
    qk_norm="full", clip=None, vocabulary=16, width=8, experts=7, top_k=2, expert_width=8, eps=1e-5, theta=1e4, context=32,
    tied=False,
)  # fmt: skip
# Two rows need at most 4 experts, which kernels bring in; three need up to 6. The last layer is complete.
CAPACITIES = (5, 6, 7)
THREE, TWO = [[1, 2, 3], [9], [4, 5]], [[6, 7], [8, 2, 1]]


def turns(engine: Engine) -> dict[str, Any]:
    """What came of it, by name."""
    decoder: Any = engine.decoder
    told: dict[str, Any] = {"logits": [], "by": [], "figures": []}

    def step(*tokens: int) -> None:
        told["logits"].append(decoder.step(torch.tensor(tokens)).tolist())
        told["by"].append(decoder.filled_by)

    decoder.prefill(THREE)
    step(1, 2, 3)
    decoder.keep([0, 2])
    step(4, 5)
    step(7, 8)
    decoder.keep([1])
    step(6)
    texts = generate(decoder, TWO, 4)
    told["figures"].append((texts.tokens, texts.accesses, texts.hits))
    found = measured.decode(engine, Prompted(TWO, ""), 1, 2)
    told["figures"].append((found.accesses, found.hits, found.installs, found.from_memory, found.digest()))
    # Wide again, no prompt between, and nobody has asked for the books.
    step(3, 1)
    decoder.warm(3)
    step(2, 9, 4)
    decoder.settle()
    cache, slots = engine.cache, engine.slots
    return told | {
        "counts": (cache.decoded, cache.prefilled),
        "residents": cache.resident,
        "ranks": vars(cache.policy),
        "slots": (slots.slot, slots.free, slots.installs),
        "served": engine.host.served,
    }


def main() -> None:
    """Compare."""
    torch.set_num_threads(1)
    told = []
    for fills in ("host", "auto"):
        kind = partial(FusedDecoder, fills=fills)
        assemble._decoder_kind = lambda *_, kind=kind: kind
        asked = Decode.model_validate({"model": {"config": "tiny"}, "slots_by_layer": CAPACITIES})
        told.append(turns(assemble.build(asked, Drawn(SHAPE, 1, "F32"), torch.device("cpu"), 16, 3)))
    hosts, kernels = told
    print(
        json.dumps(
            {"by": kernels.pop("by"), "differ": [what for what in kernels if hosts[what] != kernels[what]]}
        )
    )


main()
