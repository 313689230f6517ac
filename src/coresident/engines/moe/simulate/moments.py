"""What caches are asked for, moment by moment: the traces' prefill waves and decode steps, laid out for many caches at once.

A *stream* is what one cache lives through: one prompt where every prompt starts with nothing resident (`fresh`), all prompts
one after the other where residents are `kept`. Every layer of every stream is a *lane* with residents of its own, and lanes
never meet, so that all lanes advance together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coresident.engines.moe.traces.masks import Bools, masks
from coresident.engines.moe.traces.traces import Trace, Traces

Between = Literal["fresh", "kept"]


@dataclass(frozen=True)
class Stream:
    """One cache's life. `chosen` bool [M, L, N] is empty where a layer does nothing at that moment; `step` int [M] is the
    decode step's number in its prompt, -1 at a prefill wave; `prompt` int [M] its place in the set; `ahead` int16 [M, L, m]
    what is fetched before the step, best first, -1 for nothing.
    """

    chosen: Bools
    step: NDArray[np.int64]
    prompt: NDArray[np.int64]
    ahead: NDArray[np.int16]


@dataclass(frozen=True)
class Moments:
    """All streams side by side, padded at the end: arrays as in `Stream` over lanes = streams x layers."""

    streams: tuple[Stream, ...]
    chosen: Bools
    ahead: NDArray[np.int16]
    capacities: NDArray[np.int64]
    layers: int


def lay_out(
    traces: Traces,
    capacities: Sequence[int],
    between: Between,
    predicted: Sequence[NDArray[np.int16]] | None = None,
) -> Moments:
    """The moments of `traces` in caches of `capacities[layer]` slots; `predicted[prompt]` int16 [steps, L, m]."""
    places = range(len(traces.prompts))
    groups = [list(places)] if between == "kept" else [[place] for place in places]
    streams = tuple(_stream(traces, group, capacities, predicted) for group in groups)
    longest = max(len(one.step) for one in streams)
    chosen = np.concatenate([_padded(one.chosen, longest, False) for one in streams], axis=1)
    ahead = np.concatenate([_padded(one.ahead, longest, -1) for one in streams], axis=1)
    repeated = np.tile(np.asarray(capacities, dtype=np.int64), len(streams))
    return Moments(streams, chosen, ahead, repeated, traces.layers)


def _stream(
    traces: Traces,
    places: Sequence[int],
    capacities: Sequence[int],
    predicted: Sequence[NDArray[np.int16]] | None,
) -> Stream:
    width = 0 if predicted is None else predicted[0].shape[-1]
    chosen, steps, prompts, ahead = [], [], [], []
    for place in places:
        one = traces.prompts[place]
        first = waves(one, capacities, traces.model.experts)
        then = masks(one.decoded, traces.model.experts)
        chosen += [first, then]
        steps += [np.full(len(first), -1), np.arange(len(then))]
        prompts.append(np.full(len(first) + len(then), place))
        ahead.append(np.full((len(first), traces.layers, width), -1, np.int16))
        if predicted is None:
            ahead.append(np.full((len(then), traces.layers, 0), -1, np.int16))
        else:
            ahead.append(predicted[place].astype(np.int16))
    return Stream(
        np.concatenate(chosen), np.concatenate(steps), np.concatenate(prompts), np.concatenate(ahead)
    )


def waves(one: Trace, capacities: Sequence[int], count: int) -> Bools:
    """A prefill as `Cache.prefill` runs it: bool [waves of the layer that has most, L, N]."""
    needed = masks(one.experts[: one.prefill], count).any(axis=0)
    rank = needed.cumsum(axis=1) - 1
    wave = np.where(needed, rank // np.asarray(capacities)[:, None], -1)
    return np.asarray(wave[None] == np.arange(wave.max() + 1)[:, None, None])


def _padded(array: NDArray[Any], length: int, value: int | bool) -> NDArray[Any]:
    missing = np.full((length - len(array), *array.shape[1:]), value, dtype=array.dtype)
    return np.concatenate([array, missing])
