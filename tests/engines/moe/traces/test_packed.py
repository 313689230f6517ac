"""Logits in fewer bits still choose what was chosen."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from coresident.engines.moe.traces.files import read, write
from coresident.engines.moe.traces.packed import packed, rounded, unpacked


def _close(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows in which chosen and other logits are as close as float32 lets them be."""
    source = np.random.default_rng(seed)
    logits = (source.normal(size=(200, 16)) * 3).astype(np.float32)
    logits[::2] = logits[::2, :1] + np.arange(16, dtype=np.float32) * 1e-6
    return logits, np.argsort(-logits, axis=-1, kind="stable")[:, :4]


def _chosen(logits: np.ndarray, experts: np.ndarray) -> bool:
    inside = np.take_along_axis(logits, experts, -1).min(axis=-1)
    outside = logits.copy()
    np.put_along_axis(outside, experts, -np.inf, -1)
    return bool((inside > outside.max(axis=-1)).all())


@pytest.mark.parametrize("seed", range(3))
def test_what_was_not_chosen_never_ties_with_what_was(seed: int) -> None:
    logits, experts = _close(seed)
    half, whole = rounded(logits, experts, "float16"), rounded(logits, experts, "float32")
    byte = unpacked(*packed(logits, experts))
    assert _chosen(half.astype(np.float32), experts)
    assert _chosen(whole, experts)
    assert _chosen(byte, experts)
    np.testing.assert_allclose(half, logits, rtol=2e-3, atol=2e-3)
    spans = logits.max(axis=-1) - logits.min(axis=-1)
    assert (np.abs(byte - logits).max(axis=-1) <= spans / 254 * 1.5 + 1e-5).all()


def test_a_row_of_one_value_is_kept() -> None:
    codes, spans = packed(np.full((1, 4), 2.5, np.float32), np.array([[0, 1]]))
    np.testing.assert_allclose(unpacked(codes, spans), 2.5, atol=1e-6)


def test_a_set_of_bytes_is_a_quarter_of_the_size_and_reads_as_valid(made: Callable, tmp_path: Path) -> None:
    traces = made(prompts=4, experts=64, k=8)
    write(traces, tmp_path / "whole")
    write(traces, tmp_path / "packed", pack=True)
    sizes = [(tmp_path / name / "routing.safetensors").stat().st_size for name in ("whole", "packed")]
    assert sizes[1] < 0.35 * sizes[0]
    for one, other in zip(read(tmp_path / "packed").prompts, traces.prompts, strict=True):
        np.testing.assert_array_equal(one.experts, other.experts)
        np.testing.assert_allclose(one.logits, other.logits, atol=0.1)
