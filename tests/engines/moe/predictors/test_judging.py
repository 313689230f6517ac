"""What recall says of labels whose truth is known: permuted, random, and planted."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from coresident.engines.moe.predictors.fitted import fit
from coresident.engines.moe.predictors.judging import judge, score
from coresident.engines.moe.predictors.kinds import KINDS, Kind
from coresident.engines.moe.predictors.ranking import ranked
from coresident.engines.moe.traces import validity
from coresident.engines.moe.traces.traces import Trace, Traces
from coresident.errors import UserError

_LEARNED: tuple[Kind, ...] = ("transition", "probe")


def _each(traces: Traces, change: Callable[[Trace], Trace]) -> Traces:
    return replace(traces, prompts=tuple(change(one) for one in traces.prompts))


def _logits_of(experts: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Logits that choose these experts."""
    source = np.random.default_rng(seed)
    logits = source.normal(size=(*experts.shape[:-1], count)).astype(np.float32)
    np.put_along_axis(
        logits, experts.astype(np.int64), 6 + np.arange(experts.shape[-1], 0, -1, dtype=np.float32), -1
    )
    return logits


def _skewed(made: Callable, **values: int) -> Traces:
    """Experts drawn with unequal chances, the same for every token: a layer's own frequency is all there is to know."""
    base = made(**values)
    source = np.random.default_rng(1)
    weights = np.linspace(2.0, 0.0, base.model.experts)

    def drawn(one: Trace) -> Trace:
        scores = weights + source.gumbel(size=(len(one.tokens), base.layers, base.model.experts))
        experts = np.argsort(-scores, axis=-1)[..., : base.model.top_k].astype(np.uint8)
        return replace(one, experts=experts, logits=_logits_of(experts, base.model.experts, 0))

    return _each(base, drawn)


@pytest.mark.parametrize("kind", _LEARNED)
def test_labels_permuted_across_tokens_give_static_frequencys_recall(made: Callable, kind: Kind) -> None:
    traces = _skewed(made, prompts=16, steps=120, layers=3)
    source = np.random.default_rng(2)

    def permuted(one: Trace) -> Trace:
        experts, logits = one.experts.copy(), one.logits.copy()
        for layer in range(traces.layers):
            order = source.permutation(len(one.tokens))
            experts[:, layer], logits[:, layer] = experts[order, layer], logits[order, layer]
        return replace(one, experts=experts, logits=logits)

    without = _each(traces, permuted)
    held = without.of("held-out")
    static = judge(fit("static", 1, without), held, 3)["all"].recall
    assert judge(fit(kind, 1, without), held, 3)["all"].recall == pytest.approx(static, abs=0.02)
    assert static > 1.5 * 3 / 16


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("next-router", "oracle")])
def test_uniform_random_labels_give_about_m_of_n(made: Callable, kind: Kind) -> None:
    traces = _each(made(prompts=16, steps=100), lambda one: _uniform(one, 3, 3))
    for width in (3, 6):
        if kind == "previous-token" and width > 3:
            continue
        found = judge(fit(kind, 1, traces), traces.of("held-out"), width)["all"]
        assert found.recall == pytest.approx(width / 16, abs=0.02)


def _uniform(one: Trace, k: int, seed: int) -> Trace:
    source = np.random.default_rng([seed, int(one.name[-3:])])
    scores = source.random((*one.experts.shape[:2], 16))
    experts = np.argsort(-scores, axis=-1)[..., :k].astype(np.uint8)
    return replace(one, experts=experts, logits=_logits_of(experts, 16, seed))


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", _LEARNED)
def test_a_planted_identity_is_found_whole(made: Callable, kind: Kind, depth: int, k: int) -> None:
    base = made(prompts=8, steps=150, layers=depth + 2, k=k)
    shuffle = np.random.default_rng(4).permutation(16)

    def planted(one: Trace) -> Trace:
        one = _uniform(one, k, 5)
        experts = one.experts.copy()
        for layer in range(depth, base.layers):
            experts[:, layer] = shuffle[experts[:, layer - depth]]
        # Prompts differ in length, so that a pair taken across two of them would be a wrong one.
        rows = slice(len(one.tokens) - int(one.name[-1]))
        return replace(
            one, tokens=one.tokens[rows], experts=experts[rows], logits=_logits_of(experts, 16, 6)[rows]
        )

    traces = _each(base, planted)
    fitted = fit(kind, depth, traces)
    for width in (k, 2 * k):
        assert judge(fitted, traces.of("held-out"), width)["all"].recall == 1


def test_the_token_before_is_what_was_chosen_a_row_earlier(made: Callable) -> None:
    traces = made(prompts=2)
    found = ranked(fit("previous-token", 1, traces), traces, 3)
    for one, predicted in zip(traces.prompts, found, strict=True):
        np.testing.assert_array_equal(predicted, one.experts[one.prefill - 1 : -1])


def test_the_rank_of_the_token_before_begins_with_what_it_chose(made: Callable) -> None:
    traces = made(prompts=2)
    found = ranked(fit("previous-rank", 1, traces), traces, 6)[0]
    np.testing.assert_array_equal(found[..., :3], ranked(fit("previous-token", 1, traces), traces, 3)[0])
    assert (np.sort(found, axis=-1)[..., 1:] != np.sort(found, axis=-1)[..., :-1]).all()
    wider = ranked(fit("previous-token", 1, traces), traces, 6)[0]
    assert (wider[..., 3:] == -1).all()


def test_what_looks_at_the_same_token_says_nothing_of_the_first_layers(made: Callable) -> None:
    traces = made()
    for kind in (*_LEARNED, "oracle"):
        found = ranked(fit(kind, 2, traces), traces.of("held-out"), 3)[0]
        assert (found[:, :2] == -1).all()
        assert (found[:, 2:] >= 0).all()


def test_the_router_ahead_is_read_at_its_own_depth(made: Callable) -> None:
    base = made(prompts=4)

    def shown(one: Trace) -> Trace:
        ahead = np.zeros((len(one.tokens), 2, 4, 8), np.uint8)
        ahead[:, 1, :, :3] = one.experts
        ahead[:, 1, :, 3:] = 15
        return replace(one, ahead=ahead)

    traces = replace(_each(base, shown), depths=(1, 3))
    held = traces.of("held-out")
    assert judge(fit("next-router", 3, traces), held, 3)["all"].recall == 1
    assert judge(fit("next-router", 1, traces), held, 3)["all"].recall < 0.9
    with pytest.raises(UserError, match="2 layers ahead, and the traces have 1, 3"):
        judge(fit("next-router", 2, traces), held, 3)
    with pytest.raises(UserError, match="keep the first 8 experts"):
        judge(fit("next-router", 3, traces), held, 9)


def test_precision_counts_what_was_predicted_and_recall_what_was_chosen(made: Callable) -> None:
    traces = made(prompts=1)
    one = traces.prompts[0]
    half = np.full((one.steps, 4, 6), -1, np.int16)
    half[..., 0] = one.decoded[..., 2]
    half[..., 1] = (one.decoded.astype(int).max(axis=-1) + 1) % 17
    found = score(traces, [half], depth=1)
    assert found.recall == pytest.approx(1 / 3)
    assert found.precision == pytest.approx(1 / 2)


def test_predictors_of_one_depth_are_judged_on_the_same_layers(made: Callable) -> None:
    traces = made()
    held = traces.of("held-out")
    made_ = fit("static", 3, traces)
    whole = ranked(made_, held, 3)
    last = [np.where(np.arange(4)[:, None] == 3, one, -1).astype(np.int16) for one in whole]
    assert judge(made_, held, 3)["all"].recall == score(held, last, depth=3).recall


def test_families_are_judged_apart(made: Callable) -> None:
    traces = made()
    found = judge(fit("static", 1, traces), traces.of("held-out"), 3)
    assert set(found) == {"all", "code", "prose"}
    assert found["all"].recall == pytest.approx((found["code"].recall + found["prose"].recall) / 2)


@pytest.mark.parametrize("kind", ["static", *_LEARNED])
def test_nothing_is_judged_on_a_prompt_that_it_was_fitted_on(made: Callable, kind: Kind) -> None:
    traces = made()
    with pytest.raises(UserError, match="was fitted on prompt 'prompt-000'"):
        judge(fit(kind, 1, traces), traces, 3)
    seen = set(fit(kind, 1, traces).described.seen)
    assert seen == {validity.key(one) for one in traces.of("fit").prompts}
    assert not seen & {validity.key(one) for one in traces.of("held-out").prompts}


@pytest.mark.parametrize("kind", ["static", *_LEARNED])
def test_held_out_prompts_do_not_reach_the_fit(made: Callable, kind: Kind) -> None:
    traces = made()
    other = _each(
        traces,
        lambda one: (
            one if one.split == "fit" else replace(one, experts=one.experts[::-1], logits=one.logits[::-1])
        ),
    )
    for name, table in fit(kind, 1, traces).tables.items():
        np.testing.assert_array_equal(table, fit(kind, 1, other).tables[name])


def test_prompts_are_not_fitted_on_only_what_was_generated(made: Callable) -> None:
    traces = made()
    other = _each(
        traces,
        lambda one: replace(one, experts=np.concatenate([one.experts[: one.prefill][::-1], one.decoded])),
    )
    np.testing.assert_array_equal(
        fit("static", 1, traces).tables["scores"], fit("static", 1, other).tables["scores"]
    )


def test_traces_without_logits_say_so(made: Callable) -> None:
    without = _each(made(), lambda one: replace(one, logits=None))
    with pytest.raises(UserError, match="kept without router logits"):
        fit("probe", 1, without)
    with pytest.raises(UserError, match="reads router logits"):
        judge(fit("previous-rank", 1, without), without.of("held-out"), 3)


def test_traces_without_a_fit_prompt_say_so(made: Callable) -> None:
    with pytest.raises(UserError, match="no prompt of split 'fit'"):
        fit("static", 1, made().of("held-out"))
