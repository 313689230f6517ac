"""A model's own routing, recorded: by transformers' routers and by our decoder, which are one and the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coresident.engines.moe.models.checkpoint import open_checkpoint
from coresident.engines.moe.predictors.fitted import fit
from coresident.engines.moe.predictors.judging import judge
from coresident.engines.moe.traces import collect, told
from coresident.engines.moe.traces.files import read
from coresident.engines.moe.traces.prompts import Prompt
from coresident.engines.moe.traces.traces import Traces
from coresident.errors import CoresidentError, UserError

_TEXTS = (
    "Names refer to objects.",
    "The following",
    "if x in y:",
    "class Some(object):",
    "for item in list:",
)
_PROMPTS = [Prompt(f"p{number}", ("prose", "code")[number > 1], text) for number, text in enumerate(_TEXTS)]


def _trace(model: Path, out: Path, **values: Any) -> Traces:
    settings = collect.Tracing.model_validate(
        {"max_tokens": 12, "prompt_tokens": 8, "temperature": 1.0, **values}
    )
    return collect.trace(model, _PROMPTS, settings, out, "cpu", lambda _: None)


def test_a_place_that_takes_nothing_is_told_before_anything_is_traced(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "afile").write_text("")
    (tmp_path / "taken").mkdir()
    said: list[str] = []
    for out, why in (
        ("afile/t", "afile/t cannot be written: Not a directory"),
        ("taken", "taken is already there"),
    ):
        with pytest.raises(CoresidentError, match=why):
            collect.trace(tiny_model, _PROMPTS, collect.Tracing(), tmp_path / out, "cpu", said.append)
    assert not said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["afile", "taken"]


@pytest.fixture(scope="module")
def traced(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Traces, Path]:
    out = tmp_path_factory.mktemp("traces") / "set"
    return _trace(tiny_model, out, logits="float32"), out


def test_a_trace_is_what_is_on_disk_and_names_its_model(
    traced: tuple[Traces, Path], tiny_model: Path
) -> None:
    traces, out = traced
    back = read(out)
    assert back.model == traces.model
    assert back.model.identity == open_checkpoint(tiny_model).identity
    assert (back.layers, back.model.experts, back.model.top_k) == (4, 8, 2)
    assert [one.name for one in back.prompts] == [f"p{number}" for number in range(5)]
    for one in back.prompts:
        # The last token drawn is not fed back: there is nothing after it.
        assert one.prefill <= 8
        assert one.steps == 11
    assert told.summary(back)["decode_steps"] == 55


def test_logits_and_experts_are_those_of_a_plain_pass_over_the_whole_text(
    traced: tuple[Traces, Path], tiny_model: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(tiny_model), dtype=torch.float32)
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda router, given, _: seen.append(given[0] @ router.weight.T))
    for one in traced[0].prompts[:2]:
        seen.clear()
        with torch.inference_mode():
            model(torch.from_numpy(one.tokens.astype(np.int64))[None])
        whole = torch.stack([logits.flatten(0, -2) for logits in seen], 1).numpy()
        np.testing.assert_allclose(one.logits, whole, atol=1e-4)
        assert whole.min() < 0
        np.testing.assert_array_equal(
            np.sort(one.experts, axis=-1), np.sort(np.argsort(-whole, axis=-1)[..., :2], axis=-1)
        )


def test_our_decoder_records_what_transformers_does(
    traced: tuple[Traces, Path], tiny_model: Path, tmp_path: Path
) -> None:
    own = _trace(tiny_model, tmp_path / "own", by="coresident", logits="float32")
    assert (own.sampling.by, own.depths) == ("coresident", ())
    for one, other in zip(own.prompts, traced[0].prompts, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.experts, other.experts)
        np.testing.assert_allclose(one.logits, other.logits, atol=1e-4)


def test_what_a_prompt_draws_does_not_depend_on_who_goes_with_it(
    traced: tuple[Traces, Path], tiny_model: Path, tmp_path: Path
) -> None:
    alone = _trace(tiny_model, tmp_path / "alone", batch=1)
    for one, other in zip(alone.prompts, traced[0].prompts, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
    other_seed = _trace(tiny_model, tmp_path / "seed", seed=1)
    assert any((a.tokens != b.tokens).any() for a, b in zip(other_seed.prompts, alone.prompts, strict=True))


def test_a_router_shown_its_own_state_chooses_what_it_chose(
    traced: tuple[Traces, Path], tiny_model: Path
) -> None:
    """What a router ranks ahead is its own norm and weight on the earlier layer's state: recomputed here from the weights."""
    from transformers import AutoModelForCausalLM

    traces, _ = traced
    assert traces.depths == (1, 2, 3)
    one = traces.prompts[0]
    model = AutoModelForCausalLM.from_pretrained(str(tiny_model), dtype=torch.float32)
    states: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _, given: states.append(given[0][0]))
    with torch.inference_mode():
        model(torch.from_numpy(one.tokens.astype(np.int64))[None])
        kept = list(states)
        for place, depth in enumerate(traces.depths):
            for layer in range(depth, 4):
                own = model.model.layers[layer]
                ranked = (
                    own.post_attention_layernorm.forward(kept[layer - depth]) @ own.mlp.gate.weight.T
                ).topk(8)
                np.testing.assert_array_equal(one.ahead[:, place, layer, :4], ranked.indices[:, :4].numpy())
    assert judge(fit("next-router", 1, traces), traces.of("held-out"), 8)["all"].recall == 1


@pytest.mark.parametrize("kept", ["float16", "float32", "int8"])
def test_logits_that_are_kept_route_as_the_model_did(tiny_model: Path, tmp_path: Path, kept: str) -> None:
    for one in _trace(tiny_model, tmp_path / "set", logits=kept).prompts:
        assert one.logits.dtype == ("float32" if kept == "int8" else kept)
        order = torch.from_numpy(one.logits.astype(np.float32)).topk(2).indices.numpy()
        np.testing.assert_array_equal(np.sort(order, axis=-1), np.sort(one.experts, axis=-1))


def test_logits_may_be_left_out(tiny_model: Path, tmp_path: Path) -> None:
    assert all(one.logits is None for one in _trace(tiny_model, tmp_path / "set", logits="none").prompts)


def test_a_text_does_not_end_before_it_was_asked_to(tiny_model: Path, tmp_path: Path) -> None:
    ends = open_checkpoint(tiny_model).architecture.ends
    assert ends
    for one in _trace(tiny_model, tmp_path / "set", temperature=5.0, max_tokens=60).prompts:
        assert one.steps == 59
        assert not np.isin(one.tokens[one.prefill :], ends).any()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_tokens": 90}, "beyond the context of 96"),
        ({"held_out": 1.0}, ""),
    ],
)
def test_what_goes_beyond_the_context_is_refused_before_anything_runs(
    tiny_model: Path, tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    if not said:
        assert len(_trace(tiny_model, tmp_path / "set", **values).of("held-out").prompts) == 5
        return
    with pytest.raises(UserError) as error:
        _trace(tiny_model, tmp_path / "set", **values)
    assert said in error.value.problem
    assert "max_tokens" in error.value.remedy
    assert not (tmp_path / "set").exists()


def test_a_model_or_place_that_will_not_do_is_refused(
    tiny_model: Path, tmp_path: Path, made: Callable
) -> None:
    with pytest.raises(UserError, match="already there"):
        _trace(tiny_model, tmp_path)
    with pytest.raises(UserError, match=r"config\.json"):
        _trace(tmp_path, tmp_path / "set")
    with pytest.raises(UserError, match="no prompt to trace"):
        collect.trace(tiny_model, [], collect.Tracing(), tmp_path / "set", "cpu", lambda _: None)
