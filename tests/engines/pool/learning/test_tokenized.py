"""Batches: what a learner consumes, in which order, and which pairs are refused. (Equality with TRL:
test_against_trl.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coresident.engines.pool.learning.tokenized import (
    Example,
    Tokenized,
    TokenPair,
    batches,
    collate,
    planned,
    tokenize,
)
from coresident.engines.pool.parameters import DPO
from coresident.errors import UserError
from coresident.text import arithmetic, tokenizer
from coresident.text.preferences import Pair


@pytest.fixture(scope="module")
def words(tiny_base: Path) -> Any:
    return tokenizer.load(tiny_base)


def _numbered(count: int) -> Tokenized:
    return Tokenized(tuple(TokenPair((1,), (10 + number,), (2, 3)) for number in range(count)), padding=0)


def _seen(data: Tokenized, settings: DPO, learner: int) -> list[int]:
    return [
        int(row[1]) - 10
        for batch in batches(data, settings, learner)
        for row in batch.input_ids[: settings.batch]
    ]


def test_every_pass_is_a_permutation_and_passes_differ() -> None:
    seen = _seen(_numbered(6), DPO(steps=9, batch=2), 0)
    passes = [tuple(seen[start : start + 6]) for start in (0, 6, 12)]
    assert all(sorted(one) == list(range(6)) for one in passes)
    assert len(set(passes)) == 3


def test_passes_end_a_learner_with_the_last_of_its_data() -> None:
    data, settings = _numbered(5), DPO(steps=20, batch=2, passes=1)
    sizes = [len(batch.input_ids) // 2 for batch in batches(data, settings, 0)]
    assert sizes == [2, 2, 1]
    assert planned(data, settings) == 3
    # In the order that it has without an end.
    assert sorted(_seen(data, settings, 0)[:5]) == list(range(5))
    assert _seen(data, settings, 0)[:5] == _seen(data, DPO(steps=3, batch=2), 0)[:5]
    assert planned(data, settings.model_copy(update={"passes": 3})) == 8
    assert planned(data, DPO(steps=2, batch=2, passes=9)) == 2
    assert len(list(batches(data, settings, 0, done=2))) == 1


def test_the_order_follows_from_seed_and_learner_alone() -> None:
    settings = DPO(steps=8, batch=2)
    assert _seen(_numbered(16), settings, 0) == _seen(_numbered(16), settings, 0)
    assert _seen(_numbered(16), settings, 0) != _seen(_numbered(16), settings, 1)
    assert _seen(_numbered(16), settings, 0) != _seen(
        _numbered(16), settings.model_copy(update={"seed": 43}), 0
    )


def test_a_batch_may_be_larger_than_the_data() -> None:
    seen = _seen(_numbered(2), DPO(steps=2, batch=5), 0)
    assert len(seen) == 10
    assert seen.count(0) == seen.count(1) == 5


def test_completions_end_in_one_end_token(words: Any) -> None:
    pairs = [Pair("Say:", " yes", f" no{words.eos_token}")]
    (ids,) = tokenize(pairs, words, DPO()).pairs
    for completion in (ids.chosen, ids.rejected):
        assert completion[-1] == words.eos_token_id
        assert completion.count(words.eos_token_id) == 1


def test_a_prompt_that_fills_max_length_is_refused_with_its_origin(words: Any) -> None:
    pairs = [*arithmetic.pairs(2, 100), Pair("one two three four five six", " a", " b", "pairs.jsonl line 7")]
    longest = len(words(pairs[2].prompt)["input_ids"])
    settings = DPO(max_length=longest)
    with pytest.raises(UserError) as caught:
        tokenize(pairs[2:], words, settings)
    assert caught.value.problem.startswith(f"pairs.jsonl line 7: the prompt is {longest} tokens long")
    assert caught.value.remedy == f"raise max_length above {longest} or shorten the prompt"
    with pytest.raises(UserError, match=r"^pair 1: "):
        tokenize(pairs[:1], words, settings.model_copy(update={"max_length": 8}))
    assert len(tokenize(pairs[2:], words, DPO(max_length=longest + 1)).pairs) == 1


def test_chat_pairs_need_a_template(words: Any, tiny_base: Path) -> None:
    chat = Pair(
        ({"role": "user", "content": "hi"},),
        ({"role": "assistant", "content": "yes"},) * 1,
        ({"role": "assistant", "content": "no"},),
    )
    assert len(tokenize([chat], words, DPO()).pairs) == 1
    plain = tokenizer.load(tiny_base)
    plain.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        tokenize([chat], plain, DPO())
    plain.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(UserError, match="renders a completion as nothing"):
        tokenize([chat], plain, DPO())


def test_padding_is_the_tokenizers(words: Any) -> None:
    assert tokenize(arithmetic.pairs(1, 100), words, DPO()).padding == words.pad_token_id


def test_filled_data_leaves_no_row_padded_whatever_the_tokenizer(words: Any) -> None:
    from coresident.engines.pool.learning import data

    settings = DPO.model_validate({"max_length": 128, "data": {"pairs": 6, "fill": True}, "steps": 3})
    for batch in batches(data.tokens(settings, 0, words), settings, 0):
        assert batch.tokens == batch.attention_mask.numel() == 2 * settings.batch * 128

    class Greedy:
        """A tokenizer to which a passage is one token."""

        pad_token_id, eos_token = 0, "<end>"

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [3] if len(text) < 100 else [3, 4]}

    with pytest.raises(UserError, match=r"data\.fill: 0 of 12 pairs reach 128 tokens"):
        data.tokens(settings, 0, Greedy())


def test_batches_that_are_done_are_left_out() -> None:
    settings = DPO(steps=9, batch=2)
    rest = batches(_numbered(6), settings, 0, done=4)
    seen = [int(row[1]) - 10 for batch in rest for row in batch.input_ids[:2]]
    assert seen == _seen(_numbered(6), settings, 0)[8:]


def test_each_scored_token_has_the_place_that_predicts_it() -> None:
    pairs = [TokenPair((1, 2), (3, 4), (5,)), TokenPair((6,), (7,), (8, 9, 10))]
    batch = collate(pairs, 3, padding=0)
    flat = batch.input_ids.flatten()
    assert batch.labels.tolist() == [3, 7, 5, 8, 9]
    assert flat[batch.places + 1].tolist() == batch.labels.tolist()
    whole = collate([Example((), (4, 5, 6))], 8, padding=0)
    assert whole.labels.tolist() == [5, 6], "a first token is predicted by nothing"
