"""A learner that writes into the base ends at once, with status 77 and a line that names the tensor; other
faults do not.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from coresident.engines.pool.base import base, loading
from coresident.engines.pool.base.tensors import Layout, Slot, Stored
from coresident.engines.pool.sharing import arena, fault

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def tensors(tiny_base: Path) -> Tensors:
    plan = base.read(tiny_base).layout("float32")
    descriptor = arena.create(plan.size)
    arena.write(descriptor, plan)
    return arena.attach(descriptor, plan)


def guarded(tensors: Tensors, act: Callable[[Tensors], object]) -> tuple[int, bytes]:
    """Do `act` in a forked child under the guard; its exit code (negative: the signal) and what the guard
    wrote.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        assert fault.guard(loading.ranges(tensors), writing, b"wrote at @\n", b"cut at @\n") is None
        act(tensors)
        os._exit(0)
    os.close(writing)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with os.fdopen(reading, "rb") as stream:
        return code, stream.read()


def _in_a_thread(tensors: Tensors) -> None:
    writer = threading.Thread(target=lambda: tensors["model.layers.1.mlp.up_proj.weight"].zero_())
    writer.start()
    writer.join()


def _in_the_middle(tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.down_proj.weight"].view(-1)[-1] = 0


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lambda tensors: tensors["model.norm.weight"].add_(1), "model.norm.weight"),
        (
            lambda tensors: tensors["model.layers.0.self_attn.q_proj.weight"].mul_(2),
            "model.layers.0.self_attn.q_proj.weight",
        ),
        (
            lambda tensors: torch.nn.init.zeros_(tensors["model.embed_tokens.weight"]),
            "model.embed_tokens.weight",
        ),
        (_in_the_middle, "model.layers.0.mlp.down_proj.weight"),
        (_in_a_thread, "model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_a_write_into_the_base_names_the_tensor(
    tensors: Tensors, act: Callable[[Tensors], object], name: str
) -> None:
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    assert guarded(tensors, act) == (fault.EXIT, f"wrote at {name}\n".encode())
    assert all(torch.equal(before[key], tensors[key]) for key in tensors)


def test_a_kernels_own_thread_is_named_too(tiny_base: Path) -> None:
    # More elements than torch gives to one thread: half of them are written by a thread Python never started.
    memory = mmap.mmap(-1, 4 << 20, prot=mmap.PROT_READ)
    large = loading.view(
        memory,
        Layout(
            (Slot(Stored("w", tiny_base, "float32", (1 << 20,), 0, 4 << 20), "float32", 0, 4 << 20),), 4 << 20
        ),
    )

    def write(tensors: Tensors) -> None:
        torch.set_num_threads(2)
        tensors["w"].mul_(2)

    assert guarded(large, write) == (fault.EXIT, b"wrote at w\n")


def test_reading_is_no_fault(tensors: Tensors) -> None:
    assert guarded(tensors, lambda held: sum(tensor.sum() for tensor in held.values())) == (0, b"")


def test_a_fault_elsewhere_goes_its_ordinary_way(tensors: Tensors) -> None:
    assert guarded(tensors, lambda _: ctypes.memset(8, 0, 1)) == (-signal.SIGSEGV, b"")


def test_the_handler_that_was_there_before_gets_what_is_not_ours(tensors: Tensors, tmp_path: Path) -> None:
    # As a learner does: faulthandler first, so that an ordinary crash still leaves its traceback.
    log = tmp_path / "log"

    def crash(_: Tensors) -> None:
        ctypes.memset(8, 0, 1)

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with log.open("wb") as stream:
            faulthandler.enable(stream)
            fault.guard(loading.ranges(tensors), writing, b"wrote at @\n", b"cut at @\n")
            crash(tensors)
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    assert b"Segmentation fault" in log.read_bytes()
    os.close(reading)


def test_a_file_cut_short_under_a_mapping_is_told(tmp_path: Path, tiny_base: Path) -> None:
    directory = Path(shutil.copytree(tiny_base, tmp_path / "base"))
    mapped = loading.mapped(base.read(directory), "float32")

    def read_after_cut(held: Tensors) -> None:
        os.truncate(directory / "model.safetensors", 0)
        held["model.norm.weight"].sum()

    assert guarded(mapped, read_after_cut) == (fault.EXIT, b"cut at model.norm.weight\n")
