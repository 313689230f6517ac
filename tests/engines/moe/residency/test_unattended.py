"""Kernels that keep a cache's books, interpreted: every decision is the host's, and the right records are in the slots."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.moe import assemble
from coresident.engines.moe.parameters import Decode
from coresident.errors import UserError

BOOKS = Path(__file__).with_name("interpreted_books.py")


@pytest.mark.slow
def test_kernels_decide_what_the_host_decides(interpreted: Callable[..., Any]) -> None:
    assert interpreted(BOOKS) == {"lru": [], "lfu": [], "lfu-decay": [], "static": []}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "seen"), [("rule", "priorities"), ("asleep", "counts"), ("record", "records")]
)
def test_a_fault_is_seen(fault: str, seen: str, interpreted: Callable[..., Any]) -> None:
    assert seen in interpreted(BOOKS, fault)["lfu-decay"]


def test_a_record_far_into_a_large_arena_is_found() -> None:
    """64 layers of 128 experts of 9 MB are more words than 32 bits count. Compiled for a card, which need not be here."""
    pytest.importorskip("triton")
    compiled = (
        "import triton\n"
        "from triton.backends.compiler import GPUTarget\n"
        "from triton.compiler import ASTSource\n"
        "from coresident.engines.moe.residency.kernels import fetch\n"
        "kinds = ['*i32'] * 4 + ['i32'] * 2 + ['constexpr']\n"
        "source = ASTSource(fetch, dict(zip(fetch.arg_names, kinds, strict=True)), {(6,): 4096})\n"
        "print(triton.compile(source, target=GPUTarget('cuda', 90, 32)).asm['ttir'])\n"
    )
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", compiled], env=without, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    offsets = re.findall(r"tt\.addptr %(records|arena), [^:]*: !tt\.ptr<i32>, (i\d+)", ran.stdout)
    assert sorted(offsets) == [("arena", "i64"), ("records", "i64")]


def test_kernels_keep_books_only_where_they_read_all_experts_and_know_the_rule() -> None:
    pytest.importorskip("triton")
    from coresident.engines.moe.policies import LRU, policy
    from coresident.engines.moe.residency.unattended import possible
    from coresident.engines.moe.tiers.host import Arena
    from coresident.engines.moe.tiers.memory import allocate

    class Another(LRU):
        """Ranks by a rule of its own."""

    pageable = Arena(allocate(1, 4096, pin=False), {(0, 0): 0})
    card, here, lru = torch.device("cuda"), torch.device("cpu"), policy("lru", 1, 1)
    assert possible(lru, pageable, here)
    assert not possible(lru, pageable, card)
    assert not possible(Another(1, 1), pageable, here)


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
