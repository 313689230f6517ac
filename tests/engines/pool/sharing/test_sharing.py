"""Sharing is what the page tables show, in both directions."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from coresident.engines.pool.base import base, loading
from coresident.engines.pool.sharing import arena
from coresident.engines.pool.sharing.sharing import Held, decide, held

MIB = 2**20


def _in_child(measure: Callable[[], Held]) -> Held:
    """`measure()` in a forked child, while the parent is still there."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, json.dumps(asdict(measure())).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        seen = Held(**json.loads(stream.read()))
    os.waitpid(child, 0)
    return seen


def _touched(tensors: dict[str, torch.Tensor]) -> Held:
    for tensor in tensors.values():
        tensor.double().sum()
    return held(loading.ranges(tensors).values())


def test_a_private_copy_is_private(tiny_base: Path) -> None:
    seen = _touched(loading.private(base.read(tiny_base), "float32"))
    assert (seen.private, seen.shared, seen.others) == (seen.size, 0, 0)
    assert decide("none", [seen], 1).passed is True
    assert decide("fork", [seen], 2).passed is False


def test_an_arena_mapped_by_two_is_shared(tiny_base: Path) -> None:
    plan = base.read(tiny_base).layout("float32")
    descriptor = arena.create(plan.size)
    arena.write(descriptor, plan)
    mine = arena.attach(descriptor, plan)
    _touched(mine)
    seen = _in_child(lambda: _touched(arena.attach(descriptor, plan)))
    assert (seen.private, seen.others) == (0, seen.size)
    assert decide("fork", [seen], 2).passed is True
    assert decide("none", [seen], 1).passed is False
    os.close(descriptor)


def test_a_copy_that_fork_still_shares_is_not_private(tiny_base: Path) -> None:
    # Copy on write: nobody asked for sharing, and nobody wrote.
    tensors = loading.private(base.read(tiny_base), "float32")
    seen = _in_child(lambda: _touched(tensors))
    assert seen.others > 0.9 * seen.size
    assert decide("none", [seen], 1).passed is False


def test_a_range_is_counted_by_pages_and_once() -> None:
    memory = mmap.mmap(-1, 8 * mmap.PAGESIZE)
    memory[0 : 3 * mmap.PAGESIZE] = b"x" * (3 * mmap.PAGESIZE)
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    page = mmap.PAGESIZE
    seen = held([(start + 10, start + page + 1), (start + page, start + 5 * page)])
    assert (seen.size, seen.resident) == (5 * page, 3 * page)


ALL = Held(size=100 * MIB, resident=100 * MIB, private=100 * MIB, shared=0, others=0)
FILE = Held(size=100 * MIB, resident=100 * MIB, private=0, shared=100 * MIB, others=100 * MIB)
LONE_FILE = Held(size=100 * MIB, resident=100 * MIB, private=0, shared=100 * MIB, others=0)
PAGED_OUT = Held(size=100 * MIB, resident=60 * MIB, private=60 * MIB, shared=0, others=0)


@pytest.mark.parametrize(
    ("asked", "learners", "together", "passed", "said"),
    [
        ("none", [ALL, ALL], 2, True, ""),
        ("none", [ALL, FILE], 2, False, "learner 1 shared 100.0 %"),
        ("mapped", [FILE, FILE], 2, True, ""),
        ("mapped", [FILE, ALL], 2, False, "learner 1 had a private copy of 100.0 %"),
        ("mapped", [LONE_FILE], 1, True, ""),
        ("mapped", [LONE_FILE, LONE_FILE], 2, False, "only 0.0 % of its base in common"),
        ("fork", [FILE], 2, True, ""),
        ("fork", [ALL], 2, False, "private copy"),
        ("none", [PAGED_OUT], 1, None, "only 60.0 % of its base in memory"),
        ("none", [ALL, None], 2, None, "page map"),
        ("none", [], 0, None, "page map"),
    ],
)
def test_what_follows(
    asked: str, learners: list[Held | None], together: int, passed: bool | None, said: str
) -> None:
    decision = decide(asked, learners, together)
    assert decision.passed is passed
    assert said in decision.reason


def test_pss_is_this_processs_memory() -> None:
    """In a small process: of libraries that others map too, its share changes whenever one of them comes or goes."""
    code = """if True:
        import mmap
        from coresident.engines.pool.sharing.sharing import pss
        before = pss()
        # A mapping of its own: an allocator may hand out pages that this process has already.
        memory = mmap.mmap(-1, 32 << 20)
        memory.write(bytes(32 << 20))
        print(pss() - before)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 30 * MIB < int(done.stdout) < 70 * MIB
