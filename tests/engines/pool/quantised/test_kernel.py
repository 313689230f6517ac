"""Our kernel for GPUs does what plain operations do: its logic under Triton's interpreter, its bits on a card."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from coresident.engines.pool.quantised import kernel, nf4

SHAPES = [(96, 64), (33, 50), (40, 1000), (7, 9)]

INTERPRETED = f"""
import torch
from coresident.engines.pool.quantised import kernel, nf4, room
for shape in {SHAPES}:
    held = nf4.quantise(torch.randn(shape) * 0.02)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert kernel.serves(held, dtype)
        found, plain = kernel.prepared(held, dtype)(), nf4.dequantise(held, dtype)
        if dtype == torch.bfloat16:  # the interpreter cuts off where a card rounds
            assert torch.allclose(found.float(), plain.float(), rtol=2**-7), shape
        else:
            assert torch.equal(found, plain), (shape, dtype)
            shared = room.Room(40_000)
            with shared.opened():
                put = kernel.prepared(held, dtype, shared)()
                assert torch.equal(put, plain), (shape, dtype)
                assert put.data_ptr() == shared.place((1,), dtype, put.device).data_ptr()
"""


def test_the_kernels_logic_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    # The interpreter is chosen when Triton is imported.
    environment = {**os.environ, kernel.INTERPRET: "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_on_a_cpu_plain_operations_serve() -> None:
    assert not kernel.serves(nf4.quantise(torch.randn(2, 64)), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_its_bits_on_a_card(dtype: torch.dtype) -> None:
    for shape in [*SHAPES, (3584, 18944)]:
        given = (torch.randn(shape) * 0.02).cuda()
        parts = nf4.quantise(given.cpu())
        held = nf4.Quantised(
            parts.form,
            *(getattr(parts, name).cuda() for name in parts.form.sizes),
        )
        assert kernel.serves(held, dtype)
        found = kernel.prepared(held, dtype)()
        assert torch.equal(found, nf4.dequantise(held, dtype))
        assert torch.equal(found.cpu(), nf4.dequantise(parts, dtype))
