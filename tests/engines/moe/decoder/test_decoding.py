"""Texts begin, end, leave a batch and stay inside the context."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from coresident.engines.moe.assemble import Engine
from coresident.engines.moe.decoder.sampling import Sampling
from coresident.engines.moe.generate import generate
from coresident.errors import UserError

Build = Callable[..., Engine]
Prompt = Callable[..., list[int]]


def test_a_stop_token_ends_its_row_and_no_other(build: Build, prompt: Prompt) -> None:
    prompts = [prompt(6, 1), prompt(6, 2)]
    whole = generate(build("qwen3", batch=2).decoder, prompts, 20).tokens
    end = whole[0][7]
    found = generate(build("qwen3", batch=2).decoder, prompts, 20, ends={end})
    assert found.tokens[0] == whole[0][: whole[0].index(end) + 1]
    other = whole[1]
    assert found.tokens[1] == (other[: other.index(end) + 1] if end in other else other)
    assert found.step_rows[0] == 2 and found.step_rows[-1] == 1


def test_a_drawn_text_does_not_depend_on_who_is_decoded_with_it(build: Build, prompt: Prompt) -> None:
    prompts, sampling = [prompt(6, 1), prompt(9, 2)], Sampling(temperature=1.0, seed=3)
    whole = generate(build("olmoe", batch=2).decoder, prompts, 20, sampling).tokens
    end = next(token for token in whole[0][2:] if token not in whole[1])
    left = generate(build("olmoe", batch=2, slots=3).decoder, prompts, 20, sampling, ends={end}).tokens
    assert len(left[0]) < 20
    assert left[1] == whole[1]
    alone = generate(build("olmoe").decoder, prompts[1:], 20, Sampling(temperature=1.0, seed=4)).tokens
    assert alone[0] == whole[1]


def test_steps_too_wide_for_the_slots_are_counted(build: Build, prompt: Prompt) -> None:
    engine = build("olmoe", batch=6, slots=2)
    before: list[int] = []

    def emit(row: int, token: int) -> bool:
        if not before:
            before.append(engine.slots.installs)
        return False

    found = generate(engine.decoder, [prompt(4, seed) for seed in range(6)], 12, emit=emit)
    assert found.accesses - found.hits == engine.slots.installs - before[0] > 0


def test_scores_that_are_no_numbers_are_no_text(build: Build, prompt: Prompt) -> None:
    engine = build("olmoe")
    engine.decoder.dense.norm[3] = float("nan")
    with pytest.raises(UserError, match="no finite number"):
        generate(engine.decoder, [prompt(6)], 5)


def test_a_reader_may_end_a_text(build: Build, prompt: Prompt) -> None:
    seen: list[int] = []

    def emit(row: int, token: int) -> bool:
        seen.append(token)
        return len(seen) == 5

    found = generate(build("olmoe").decoder, [prompt(6)], 20, emit=emit)
    assert found.tokens == [seen] and len(seen) == 5


def test_drawn_texts_repeat_with_their_seed(build: Build, prompt: Prompt) -> None:
    texts = [
        generate(
            build("olmoe", slots=slots).decoder, [prompt(6)], 20, Sampling(temperature=1.0, seed=seed)
        ).tokens
        for slots, seed in ((3, 5), (8, 5), (3, 6))
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("tokens", "said"),
    [([], "is empty"), ([1] * 33, "33 tokens is beyond the context of 32"), ([1, 200], "holds token 200")],
)
def test_prompts_that_cannot_be_read(tokens: list[int], said: str, build: Build) -> None:
    with pytest.raises(UserError, match=said):
        build("olmoe", context=32).decoder.prefill([tokens])


def test_a_text_stops_at_the_context(build: Build) -> None:
    decoder = build("olmoe", context=6).decoder
    decoder.prefill([[1, 2, 3, 4]])
    for _ in range(2):
        decoder.step(torch.tensor([5]))
    with pytest.raises(UserError, match="7 tokens is beyond the context of 6"):
        decoder.step(torch.tensor([5]))
    with pytest.raises(UserError, match="513 tokens are beyond the model's context of 512"):
        build("olmoe", context=513)


def test_a_second_prompt_forgets_the_first(build: Build, prompt: Prompt) -> None:
    decoder = build("qwen3", slots=3).decoder
    first = generate(decoder, [prompt(10, 1)], 10).tokens
    generate(decoder, [prompt(30, 2)], 10)
    assert generate(decoder, [prompt(10, 1)], 10).tokens == first


def test_no_step_without_a_prompt(build: Build) -> None:
    with pytest.raises(UserError, match="no prompt was read"):
        build("olmoe").decoder.step(torch.tensor([1]))


def test_the_watch_sees_raw_scores_of_every_row(build: Build, prompt: Prompt) -> None:
    engine = build("qwen3", slots=3)
    seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    engine.decoder.watch = lambda *told: seen.append(told)
    engine.decoder.prefill([prompt(10)])
    engine.decoder.step(torch.tensor([1]))
    assert [layer for layer, _, _ in seen] == [0, 1, 2, 0, 1, 2]
    assert [tuple(logits.shape) for _, logits, _ in seen] == [(10, 8)] * 3 + [(1, 8)] * 3
    for _, logits, chosen in seen:
        assert not torch.allclose(logits.sum(-1), torch.ones(len(logits)))
        assert torch.equal(logits.topk(3).indices, chosen)
