"""Pairs made here: one seed is one shard, other seeds other shards, and what is chosen is true."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from coresident.text import arithmetic, pythondocs
from coresident.text.preferences import Pair

MAKERS = [arithmetic.pairs, pythondocs.pairs]


@pytest.mark.parametrize("make", MAKERS)
def test_a_seed_gives_the_same_pairs_in_every_process(make: Callable[[int, int], list[Pair]]) -> None:
    script = f"""
import hashlib
from {make.__module__} import pairs
print(hashlib.sha256(repr(pairs(20, 100)).encode()).hexdigest())
"""
    digests = {
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(digests) == 1
    assert make(20, 100) == make(30, 100)[:20]


@pytest.mark.parametrize("make", MAKERS)
def test_learners_get_shards_of_their_own(make: Callable[[int, int], list[Pair]]) -> None:
    shards = [{(pair.prompt, pair.chosen) for pair in make(50, 100 + learner)} for learner in range(4)]
    assert len(set.union(*shards)) > 0.95 * 4 * 50


def test_arithmetic_chosen_is_right_and_rejected_is_wrong() -> None:
    compute = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    pairs = arithmetic.pairs(300, 100)
    for pair in pairs:
        found = re.fullmatch(r"Compute (\d+) ([-+*]) (\d+)\.\nResult:", str(pair.prompt))
        assert found
        result = compute[found[2]](int(found[1]), int(found[3]))
        assert int(str(pair.chosen)) == result != int(str(pair.rejected))
    assert {str(pair.prompt).split()[2] for pair in pairs} == set(compute)


def test_a_passage_truly_goes_on_as_chosen_and_not_as_rejected() -> None:
    texts = pythondocs.corpus()
    for pair in pythondocs.pairs(100, 100):
        prompt, chosen, rejected = map(str, (pair.prompt, pair.chosen, pair.rejected))
        assert any(prompt + chosen in text for text in texts)
        assert any(rejected in text for text in texts)
        assert not any(prompt + rejected in text for text in texts)


@pytest.mark.parametrize("length", [8, 64, 256])
def test_a_prompt_leaves_room_for_a_completion_whatever_the_tokenizer(length: int) -> None:
    """A byte-level tokenizer makes at most one token of a byte."""
    for pair in pythondocs.pairs(100, 100, length):
        assert 0 < len(str(pair.prompt).encode()) <= length // 2 + 1
        assert str(pair.chosen).strip()
        assert str(pair.rejected).strip()


def test_the_text_is_enough_for_hundreds_of_pairs() -> None:
    assert sum(map(len, pythondocs.corpus())) > 400_000
    assert len({pair.prompt for pair in pythondocs.pairs(400, 100)}) > 350


def test_filled_pairs_are_longer_than_any_cut_and_leave_the_others_as_they_were() -> None:
    whole = "".join(pythondocs.corpus()) * 2
    for pair in pythondocs.pairs(20, 100, 512, fill=True):
        prompt, chosen, rejected = map(str, (pair.prompt, pair.chosen, pair.rejected))
        assert min(len(chosen.encode()), len(rejected.encode())) > 7 * 512
        assert prompt + chosen in whole
    assert pythondocs.pairs(5, 100) == pythondocs.pairs(5, 100, 256, fill=False)
