"""Router logits in fewer bits, such that they still say which experts were chosen: so replaying them routes as the model did.

An expert that was not chosen, and whose number would tie with one that was, goes to the number below.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def rounded(logits: NDArray[Any], experts: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Logits [..., N] as `float16` or `float32`, of which experts [..., k] are the highest."""
    kept = logits.astype(dtype)
    least, chosen = _least(kept, experts, np.asarray(np.inf, dtype))
    below = np.nextafter(least, np.asarray(-np.inf, dtype))
    return np.where(~chosen & (kept >= least), below, kept)


def packed(logits: NDArray[Any], experts: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes uint8 [..., N] and spans float32 [..., 2]: a logit is about spans[0] + spans[1] * code.

    A row's lowest logit has code 1 and its highest 255; code 0 is for what must go below.
    """
    wide = logits.astype(np.float32)
    low, high = wide.min(axis=-1, keepdims=True), wide.max(axis=-1, keepdims=True)
    step = np.maximum((high - low) / np.float32(254), np.float32(1e-12))
    codes = np.clip(np.rint((wide - low) / step) + 1, 1, 255).astype(np.uint8)
    least, chosen = _least(codes, experts, np.asarray(255, np.uint8))
    codes = np.where(~chosen & (codes >= least), least - 1, codes).astype(np.uint8)
    return codes, np.concatenate([low - step, step], axis=-1)


def unpacked(codes: NDArray[np.uint8], spans: NDArray[np.float32]) -> NDArray[np.float32]:
    """The logits of `packed`, to within half a step."""
    return np.asarray(spans[..., :1] + spans[..., 1:] * codes, dtype=np.float32)


def _least(
    kept: NDArray[Any], experts: NDArray[Any], most: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """The lowest of the chosen experts' numbers [..., 1], and which were chosen [..., N]."""
    chosen = np.zeros(kept.shape, np.bool_)
    np.put_along_axis(chosen, experts.astype(np.int64), True, axis=-1)
    return np.where(chosen, kept, most).min(axis=-1, keepdims=True), chosen
