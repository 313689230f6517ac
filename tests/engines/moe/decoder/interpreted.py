"""Run by `test_fused.py` in a process of its own, where Triton interprets kernels on the CPU.

Decodes two rows of a tiny model of each kind, one in 4 bits, plainly and fused, with all experts resident and with so few
that a step takes several waves; and one row alone, whose experts the host brings in, or kernels. Prints a line of JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from coresident.engines.moe import assemble, measured
from coresident.engines.moe.assemble import Engine
from coresident.engines.moe.decoder.decoder import Decoder
from coresident.engines.moe.decoder.fused import FusedDecoder
from coresident.engines.moe.models.architecture import Architecture
from coresident.engines.moe.models.origins import Drawn
from coresident.engines.moe.parameters import Decode
from coresident.engines.moe.prompts import Prompted

COMMON: dict[str, Any] = {
    "vocabulary": 32, "width": 64, "experts": 5, "top_k": 2, "expert_width": 64, "eps": 1e-5, "theta": 1e4, "context": 16,
    "tied": False,
}  # fmt: skip
KINDS = (
    Architecture(
        kind="olmoe", heads=2, kv_heads=2, head_width=16, dense_width=0, sparse=(True, True), normalise=False,
        qk_norm="full", clip=1.5, **COMMON,
    ),
    Architecture(
        kind="qwen3_moe", heads=2, kv_heads=1, head_width=24, dense_width=48, sparse=(False, True), normalise=True,
        qk_norm="head", clip=None, **COMMON,
    ),
)  # fmt: skip
PROMPTS = [[1, 2, 3, 4], [7, 8]]


def decoded(
    kind: Callable[..., Decoder], origin: Drawn, encoding: str, slots: int, rows: int, steps: int = 2
) -> tuple[measured.Measured, Engine]:
    """Some steps."""
    asked = Decode.model_validate({"model": {"config": "tiny"}, "slots": slots, "encoding": encoding})
    assemble._decoder_kind = lambda *_: kind
    engine = assemble.build(asked, origin, torch.device("cpu"), 12, rows)
    return measured.decode(engine, Prompted(PROMPTS[:rows], ""), 0, steps), engine


def main() -> None:
    """Compare."""
    torch.set_num_threads(1)
    told = []
    for shape, encoding in zip(KINDS, ("q4", "stored"), strict=True):
        origin = Drawn(shape, 1, "F32")
        plain, _ = decoded(Decoder, origin, encoding, 5, 2)
        (whole, _), (few, wide) = (decoded(FusedDecoder, origin, encoding, slots, 2) for slots in (5, 2))
        (alone, hosted), (unattended, kernels) = (
            decoded(partial(FusedDecoder, fills=fills), origin, encoding, 3, 1, 5)
            for fills in ("host", "auto")
        )
        kernels.decoder.settle()
        told.append(
            {
                "case": f"{shape.kind} {encoding}",
                "plain": max(
                    float((one - other).abs().max())
                    for one, other in zip(plain.logits, whole.logits, strict=True)
                ),
                "few": all(torch.equal(a, b) for a, b in zip(whole.logits, few.logits, strict=True)),
                # Prefill multiplies other numbers of rows at once, so that bits may differ.
                "alone": max(
                    float((one[:1] - other).abs().max())
                    for one, other in zip(whole.logits, alone.logits, strict=False)
                ),
                "installs": [whole.installs, few.installs, alone.installs],
                "counted": alone.accesses,
                "filled_by": [one.decoder.filled_by for one in (wide, hosted, kernels)],
                "unattended": all(
                    torch.equal(a, b) for a, b in zip(alone.logits, unattended.logits, strict=True)
                ),
                "books": [
                    [
                        one.cache.decoded == other.cache.decoded,
                        one.cache.resident == other.cache.resident,
                        one.slots.slot == other.slots.slot,
                        one.slots.installs == other.slots.installs,
                        one.host.served == other.host.served,
                    ]
                    for one, other in [(hosted, kernels)]
                ],
            }
        )
    print(json.dumps(told))


main()
