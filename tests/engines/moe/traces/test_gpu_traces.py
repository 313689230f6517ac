"""On a card: transformers' routers and our decoder's record the same, and what a CPU records."""

import os
from pathlib import Path

import numpy as np
import pytest

from coresident.engines.moe.traces import collect
from coresident.engines.moe.traces.prompts import Prompt

pytestmark = pytest.mark.gpu


def test_a_card_records_what_a_cpu_does(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", card)
    prompts = [
        Prompt("one", "prose", "Names refer to objects."),
        Prompt("two", "code", "class Some(object):"),
    ]
    found = {}
    for name, device, by in (
        ("cpu", "cpu", "transformers"),
        ("hooked", card, "transformers"),
        ("own", card, "coresident"),
    ):
        settings = collect.Tracing(
            max_tokens=24, prompt_tokens=8, temperature=0.0, logits="float32", by=by, held_out=0.0
        )
        found[name] = collect.trace(tiny_model, prompts, settings, tmp_path / name, device, lambda _: None)
    for other in ("hooked", "own"):
        for one, two in zip(found["cpu"].prompts, found[other].prompts, strict=True):
            np.testing.assert_array_equal(one.tokens, two.tokens)
            np.testing.assert_array_equal(one.experts, two.experts)
            np.testing.assert_allclose(one.logits, two.logits, atol=1e-3)
