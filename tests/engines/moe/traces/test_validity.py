"""What no router does is found before a figure is made of it."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from coresident.engines.moe.traces import validity
from coresident.engines.moe.traces.packed import rounded
from coresident.engines.moe.traces.traces import Trace, Traces
from coresident.errors import UserError


def _refused(traces: Traces, said: str) -> str:
    with pytest.raises(UserError) as error:
        validity.check(traces, "here")
    assert said in error.value.problem
    assert error.value.problem.startswith("here")
    return error.value.remedy


def _each(traces: Traces, change: Callable[[Trace], Trace]) -> Traces:
    return replace(traces, prompts=tuple(change(one) for one in traces.prompts))


def test_made_traces_are_valid(made: Callable) -> None:
    validity.check(made(), "here")


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_probabilities_are_not_logits(made: Callable, kind: type) -> None:
    def probable(one: Trace) -> Trace:
        chances = np.exp(one.logits) / np.exp(one.logits).sum(axis=-1, keepdims=True)
        return replace(one, logits=chances.astype(kind))

    assert "before the softmax" in _refused(
        _each(made(), probable), "holds probabilities, not raw router logits"
    )


def test_probabilities_that_half_precision_loses_are_not_logits(made: Callable) -> None:
    """Where a chosen expert's is zero as well, what was not chosen is kept just below."""

    def sharp(one: Trace) -> Trace:
        chances = np.exp(30 * (one.logits - one.logits.max(axis=-1, keepdims=True)))
        chances /= chances.sum(axis=-1, keepdims=True)
        return replace(one, logits=rounded(chances, one.experts, "float16"))

    traces = _each(made(), sharp)
    assert min(one.logits.min() for one in traces.prompts) < 0
    _refused(traces, "holds probabilities")


def test_probabilities_of_one_layer_are_not_logits(made: Callable) -> None:
    def probable(one: Trace) -> Trace:
        logits = one.logits.copy()
        logits[:, 1] = np.exp(logits[:, 1]) / np.exp(logits[:, 1]).sum(axis=-1, keepdims=True)
        return replace(one, logits=logits)

    _refused(_each(made(), probable), "holds probabilities")


def test_logits_that_are_all_above_zero_are_no_probabilities(made: Callable) -> None:
    validity.check(_each(made(), lambda one: replace(one, logits=one.logits - one.logits.min())), "here")


def test_an_expert_is_chosen_once(made: Callable) -> None:
    def twice(one: Trace) -> Trace:
        experts = one.experts.copy()
        experts[7, 2, 1] = experts[7, 2, 0]
        return replace(one, experts=experts)

    _refused(_each(made(), twice), "token 7, layer 2: one expert is chosen twice")


def test_an_expert_exists(made: Callable) -> None:
    _refused(_each(made(), lambda one: replace(one, experts=one.experts + 14)), "of 16")


def test_an_expert_ahead_exists(made: Callable) -> None:
    ahead = np.full((29, 1, 4, 2), 16, np.uint8)
    traces = _each(made(), lambda one: replace(one, ahead=ahead))
    _refused(replace(traces, depths=(1,)), "is shown expert 16 of 16 ahead")


def test_the_chosen_experts_are_those_of_the_highest_logits(made: Callable) -> None:
    def moved(one: Trace) -> Trace:
        experts = one.experts.copy()
        experts[1:] = one.experts[:-1]
        return replace(one, experts=experts)

    _refused(_each(made(), moved), "not those of the highest logits")


def test_a_tie_of_half_precision_is_no_mistake(made: Callable) -> None:
    def tied(one: Trace) -> Trace:
        logits = one.logits.astype(np.float16)
        order = np.argsort(-one.logits, axis=-1)
        third = np.take_along_axis(logits, order[..., 2:3], axis=-1)
        np.put_along_axis(logits, order[..., 3:4], third, axis=-1)
        return replace(one, logits=logits)

    validity.check(_each(made(), tied), "here")


def test_logits_are_finite(made: Callable) -> None:
    def burst(one: Trace) -> Trace:
        logits = one.logits.copy()
        logits[0, 0, 0] = np.nan
        return replace(one, logits=logits)

    _refused(_each(made(), burst), "not a finite number")


def test_consecutive_tokens_share_no_less_than_chance(made: Callable) -> None:
    """Labels that alternate between disjoint sets: each token's belong to another one."""

    def alternating(one: Trace) -> Trace:
        experts = np.broadcast_to(np.arange(3, dtype=np.uint8), one.experts.shape).copy()
        experts[1::2] += 3
        return replace(one, experts=experts, logits=None)

    assert "not in the tokens' order" in _refused(_each(made(), alternating), "and chance alone is 0.188")


def test_random_routing_is_at_chance_and_valid(made: Callable) -> None:
    def random(one: Trace) -> Trace:
        source = np.random.default_rng(int(one.name[-3:]))
        experts = np.argsort(source.random((*one.experts.shape[:2], 16)), axis=-1)[..., :3].astype(np.uint8)
        return replace(one, experts=experts, logits=None)

    traces = _each(made(prompts=8, steps=60), random)
    validity.check(traces, "here")
    assert validity.reuse(traces) == pytest.approx(3 / 16, abs=0.02)


def test_no_prompt_is_on_both_sides_of_the_split(made: Callable) -> None:
    traces = made()
    fit, held = traces.of("fit").prompts[0], traces.of("held-out").prompts[0]
    copied = replace(held, tokens=np.concatenate([fit.tokens[: fit.prefill], held.tokens[held.prefill :]]))
    prompts = tuple(copied if one is held else one for one in traces.prompts)
    remedy = _refused(replace(traces, prompts=prompts), "are the same and on both sides of the split")
    assert "one split" in remedy


def test_names_are_unique(made: Callable) -> None:
    _refused(_each(made(), lambda one: replace(one, name="same")), "two prompts are called 'same'")


def test_shapes_belong_together(made: Callable) -> None:
    _refused(
        _each(made(), lambda one: replace(one, experts=one.experts[:-1])),
        "experts is [28, 4, 3], not [29, 4, 3]",
    )
    _refused(_each(made(), lambda one: replace(one, prefill=0)), "prefill 0 of 29 tokens")
    _refused(replace(made(), prompts=()), "holds no prompt")
