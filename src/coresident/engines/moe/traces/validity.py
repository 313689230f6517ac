"""Whether routing can be a router's: what is wrong with traces is found before a figure is made of them.

Three mistakes look like data: probabilities where raw logits are meant (what transformers returned in 5.0 to 5.3), labels that
belong to another token or layer, and one prompt on both sides of the split.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coresident.errors import UserError

if TYPE_CHECKING:
    from coresident.engines.moe.traces.traces import Trace, Traces

# How many standard errors below chance the reuse of experts may be.
_DOUBT = 4.0
_AGAIN = "trace again from the model"


def check(traces: Traces, where: str) -> None:
    """Raise UserError, naming `where` and the prompt, for what no trace of a model can be."""
    if not traces.prompts:
        raise UserError(f"{where} holds no prompt", "trace at least one by `coresident moe trace`")
    names = [one.name for one in traces.prompts]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{where}: two prompts are called {twice!r}", "give every prompt a name of its own")
    for one in traces.prompts:
        _shapes(one, traces, where)
        _experts(one, traces.model.experts, where)
        if one.logits is not None:
            _logits(one, where)
    _apart(traces, where)
    _reuse(traces, where)


def _shapes(one: Trace, traces: Traces, where: str) -> None:
    rows, layers = len(one.tokens), traces.layers
    found = {
        "experts": (one.experts, (rows, layers, traces.model.top_k)),
        "logits": (one.logits, (rows, layers, traces.model.experts)),
        "ahead": (
            one.ahead,
            (rows, len(traces.depths), layers, one.ahead.shape[-1] if one.ahead is not None else 0),
        ),
    }
    for name, (array, shape) in found.items():
        if array is not None and array.shape != shape:
            raise UserError(
                f"{where}: prompt {one.name!r}: {name} is {list(array.shape)}, not {list(shape)}", _AGAIN
            )
    if not 1 <= one.prefill <= rows:
        raise UserError(f"{where}: prompt {one.name!r}: prefill {one.prefill} of {rows} tokens", _AGAIN)


def _experts(one: Trace, experts: int, where: str) -> None:
    ordered = np.sort(one.experts.astype(np.int64), axis=-1)
    if ordered.size and ordered.max() >= experts:
        raise UserError(f"{where}: prompt {one.name!r} chooses expert {ordered.max()} of {experts}", _AGAIN)
    if one.ahead is not None and one.ahead.size and one.ahead.max() >= experts:
        raise UserError(
            f"{where}: prompt {one.name!r} is shown expert {one.ahead.max()} of {experts} ahead", _AGAIN
        )
    same = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    if same.any():
        token, layer = np.argwhere(same)[0]
        raise UserError(
            f"{where}: prompt {one.name!r}, token {token}, layer {layer}: one expert is chosen twice", _AGAIN
        )


def _logits(one: Trace, where: str) -> None:
    assert one.logits is not None
    logits = one.logits.astype(np.float32)
    if not np.isfinite(logits).all():
        raise UserError(f"{where}: prompt {one.name!r}: a router logit is not a finite number", _AGAIN)
    if is_probabilities(logits):
        raise UserError(
            f"{where}: prompt {one.name!r} holds probabilities, not raw router logits",
            "trace the router's outputs before the softmax (transformers 5.0 to 5.3 returned them after it)",
        )
    chosen = np.take_along_axis(logits, one.experts.astype(np.int64), axis=-1)
    rest = logits.copy()
    np.put_along_axis(rest, one.experts.astype(np.int64), -np.inf, axis=-1)
    # Two logits may be one number once they are rounded to half precision.
    tie = 2.0 ** (-9 if one.logits.dtype == np.float16 else -20) * (1 + np.abs(logits).max(axis=-1))
    wrong = chosen.min(axis=-1) < rest.max(axis=-1) - tie
    if wrong.any():
        token, layer = np.argwhere(wrong)[0]
        raise UserError(
            f"{where}: prompt {one.name!r}, token {token}, layer {layer}: the chosen experts are not those of "
            "the highest logits",
            _AGAIN,
        )


def is_probabilities(logits: NDArray[Any]) -> bool:
    """Whether, of [T, L, N], every token's row of some layer is a distribution: none below zero, all summing to one."""
    if not logits.size:
        return False
    # Rounding takes what must rank below a zero a little below it.
    none_below = logits.min(axis=(0, 2)) > -0.001
    sums = np.abs(logits.sum(axis=-1, dtype=np.float64) - 1).max(axis=0) < 0.02
    return bool((none_below & sums).any())


def key(one: Trace) -> str:
    """What makes a prompt the same prompt: its own tokens."""
    return hashlib.sha256(np.ascontiguousarray(one.tokens[: one.prefill], "<i4").tobytes()).hexdigest()


def _apart(traces: Traces, where: str) -> None:
    splits: dict[str, tuple[str, str]] = {}
    for one in traces.prompts:
        name, split = splits.setdefault(key(one), (one.name, one.split))
        if split != one.split:
            raise UserError(
                f"{where}: prompts {name!r} and {one.name!r} are the same and on both sides of the split",
                "give equal prompts one split, or remove one",
            )


def reuse(traces: Traces) -> float | None:
    """The mean share of a decode step's experts that the step before it chose too; None without two steps."""
    shares = [_shared(one) for one in traces.prompts if one.steps > 1]
    return float(np.concatenate(shares).mean()) if shares else None


def _shared(one: Trace) -> NDArray[np.float64]:
    """[steps - 1, L]"""
    now, before = one.decoded[1:, :, :, None], one.decoded[:-1, :, None, :]
    return np.asarray((now == before).any(axis=-1).mean(axis=-1), dtype=np.float64)


def _reuse(traces: Traces, where: str) -> None:
    shares = [_shared(one).mean(axis=1) for one in traces.prompts if one.steps > 1]
    if not shares:
        return
    every = np.concatenate(shares)
    chosen, experts = traces.model.top_k, traces.model.experts
    chance = chosen / experts
    # A step's overlap by chance is hypergeometric.
    spread = chance * (1 - chance) / chosen * (experts - chosen) / max(1, experts - 1)
    error = (spread / (len(every) * traces.layers)) ** 0.5
    if every.mean() < chance - _DOUBT * error:
        raise UserError(
            f"{where}: consecutive tokens share {every.mean():.3f} of their experts, and chance alone is {chance:.3f}",
            "no router does that: the labels are not in the tokens' order; trace again",
        )
