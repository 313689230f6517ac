"""Kernels that keep a cache's books, interpreted: every decision is the host's, and the right records are in the slots."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.moe import assemble
from coresident.engines.moe.parameters import Decode
from coresident.errors import UserError


def interpreted(fault: str = "") -> dict[str, list[str]]:
    """What differs between the kernels and the host, by policy."""
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpreted_books.py")), fault],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    told: dict[str, list[str]] = json.loads(ran.stdout)
    return told


@pytest.mark.slow
def test_kernels_decide_what_the_host_decides() -> None:
    pytest.importorskip("triton")
    assert interpreted() == {"lru": [], "lfu": [], "lfu-decay": [], "static": []}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "seen"), [("rule", "priorities"), ("asleep", "counts"), ("record", "records")]
)
def test_a_fault_is_seen(fault: str, seen: str) -> None:
    pytest.importorskip("triton")
    assert seen in interpreted(fault)["lfu-decay"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"tier": "disk"}, "fills: device needs every expert in pinned memory, and tier is disk"),
        ({"kernels": "plain"}, "only fused kernels on a card bring experts in"),
    ],
    ids=str,
)
def test_where_kernels_cannot_fill_asking_for_it_is_an_error(given: dict[str, Any], problem: str) -> None:
    with pytest.raises((UserError, ValueError), match=problem):
        asked = Decode.model_validate({"model": {"config": "tiny"}, "fills": "device", **given})
        assemble.build(asked, assemble.open_model(asked.model), torch.device("cpu"), 20, 1)
