"""A validation loss is a mean over targets, whatever the batches, and stands beside the unigram model's."""

from __future__ import annotations

import pytest
import torch

from coresident.engines.pretrain import evaluation
from coresident.engines.pretrain.evaluation import Sum
from coresident.engines.pretrain.parameters import Runtime
from coresident.engines.pretrain.update import Losses
from coresident.errors import UserError
from coresident.model.initial import initialise
from coresident.model.llama import Llama
from coresident.model.shape import ModelShape
from coresident.text import unigram
from coresident.text.cache import TokenCache

CPU = torch.device("cpu")
SHAPE = ModelShape(vocabulary=300, layers=1, width=16, heads=2, feedforward=24, context=16)


@pytest.fixture(scope="module")
def losses() -> Losses:
    return Losses(initialise(Llama(SHAPE), 0), Runtime(), torch.float32, frozenset())


def test_every_batch_size_gives_the_same_loss_to_rounding(cache: TokenCache, losses: Losses) -> None:
    text = evaluation.held_out(cache, 16)
    found = [evaluation.evaluate(losses, text, batch, CPU) for batch in (1, 7, 128)]
    for one in found:
        assert one is not None and found[0] is not None
        assert one.keys() == {"prose", "code"}
        assert evaluation.whole(one).targets == evaluation.whole(found[0]).targets
        assert evaluation.whole(one).loss == pytest.approx(evaluation.whole(found[0]).loss, rel=1e-6)


def test_every_validation_target_counts_once_in_its_family(cache: TokenCache, losses: Losses) -> None:
    found = evaluation.evaluate(losses, evaluation.held_out(cache, 16), 64, CPU)
    assert found is not None
    assert {name: one.targets for name, one in found.items()} == {
        family: len(cache.tokens("validation", family)) - 1 for family in cache.families
    }


def test_the_whole_weighs_families_by_their_targets() -> None:
    families = {"code": Sum(10.0, 10), "prose": Sum(90.0, 30)}
    assert evaluation.told(families) == {"loss": 2.5, "targets": 40, "families": {"code": 1.0, "prose": 3.0}}


def test_a_subset_is_shared_out_by_size_and_spread_over_the_split(cache: TokenCache) -> None:
    text = evaluation.held_out(cache, 16, subset=320)
    assert sum(len(ids) for _, ids in text.values()) in (19, 20, 21)
    for blocks, ids in text.values():
        assert ids[-1] >= len(blocks) * (len(ids) - 1) // len(ids)
    sizes = {family: blocks.targets for family, (blocks, _) in text.items()}
    shares = {family: len(ids) for family, (_, ids) in text.items()}
    assert max(sizes, key=sizes.__getitem__) == max(shares, key=shares.__getitem__)


def test_a_subset_beyond_the_split_is_the_split(cache: TokenCache) -> None:
    whole, large = evaluation.held_out(cache, 16), evaluation.held_out(cache, 16, subset=10**9)
    assert all((whole[name][1] == large[name][1]).all() for name in whole)


def test_the_unigram_model_is_the_same_as_text_has_it(cache: TokenCache) -> None:
    found = evaluation.unigram(cache, evaluation.held_out(cache, 16))
    for family in cache.families:
        assert found[family].loss == pytest.approx(unigram.cross_entropy(cache, family), rel=1e-9)


def test_a_stop_ends_it_without_a_number(cache: TokenCache, losses: Losses) -> None:
    assert evaluation.evaluate(losses, evaluation.held_out(cache, 16), 1, CPU, stopped=lambda: True) is None


def test_a_split_without_targets_says_what_to_do(cache: TokenCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenCache, "tokens", lambda self, split, family=None: ())
    with pytest.raises(UserError, match="holds no target") as refused:
        evaluation.held_out(cache, 16)
    assert "validation_share" in refused.value.remedy
