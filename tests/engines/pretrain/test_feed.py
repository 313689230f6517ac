"""What an update is given: exact counts, whatever is short, and the same whoever reads it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from coresident.engines.pretrain.course import Course
from coresident.engines.pretrain.feed import Feed, Portion
from coresident.engines.pretrain.parameters import Runtime
from coresident.engines.pretrain.update import Losses, accumulate
from coresident.model.initial import initialise
from coresident.model.llama import Llama
from coresident.model.shape import ModelShape
from coresident.text.cache import TokenCache
from coresident.text.order import Cursor, Order

CPU = torch.device("cpu")
CONTEXT = 16


def feed(
    cache: TokenCache,
    course: Course,
    microbatch: int,
    prefetch: bool = True,
    blocks: int = 0,
    cursor: Cursor | None = None,
) -> Iterator[Portion]:
    order = Order(cache, "train", CONTEXT, seed=3)
    one = Feed(order, course, microbatch, CPU, blocks, cursor or Cursor(), prefetch)
    yield from one
    one.close()


def test_a_tail_of_11_blocks_with_microbatch_32_counts_and_weighs_right(cache: TokenCache) -> None:
    full, tail = feed(cache, Course(64 + 11, 1, 64), 32)
    assert [len(one.tokens) for one in full.microbatches] == [32, 32]
    (short,) = tail.microbatches
    # The short window that ends the text may be one of them.
    valid = int((short.targets >= 0).sum())
    assert 10 * CONTEXT < valid <= 11 * CONTEXT
    assert (len(short.tokens), tail.blocks, tail.valid, short.valid) == (11, 11, valid, valid)
    model = initialise(
        Llama(
            ModelShape(vocabulary=300, layers=1, width=16, heads=2, feedforward=24, context=CONTEXT),
            "reference",
        ),
        0,
    )
    found, _ = accumulate(Losses(model, Runtime(), torch.float32, frozenset({32})), tail.microbatches)
    logits = model.logits(model(short.tokens).hidden)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), short.targets.flatten())
    torch.testing.assert_close(float(found), expected.item())


def test_a_pass_ends_inside_an_update_which_is_filled_from_the_next(cache: TokenCache) -> None:
    order = Order(cache, "train", CONTEXT, seed=3)
    assert order.targets % CONTEXT, "the last window of this cache is a short one"
    portions = list(feed(cache, Course(2 * len(order), 1, 7), 4))
    assert sum(one.valid for one in portions) == 2 * order.targets
    assert {one.blocks for one in portions[:-1]} == {7}
    for one in portions:
        assert one.valid == sum(part.valid for part in one.microbatches)
        assert all(part.valid == int((part.targets >= 0).sum()) for part in one.microbatches)


def test_every_target_is_seen_once_a_pass(cache: TokenCache) -> None:
    order = Order(cache, "train", CONTEXT, seed=3)
    seen = [
        one.targets[one.targets >= 0].numpy()
        for portion in feed(cache, Course(len(order), 1, 7), 4)
        for one in portion.microbatches
    ]
    tokens = order.blocks.stream.read(1, order.targets + 1)
    assert np.array_equal(np.sort(np.concatenate(seen)), np.sort(tokens))


def test_neither_prefetching_nor_where_it_was_resumed_changes_what_comes(cache: TokenCache) -> None:
    course = Course(90, 3, 8)
    whole = [(one.samples, one.cursor) for one in feed(cache, course, 8)]
    assert whole == [(one.samples, one.cursor) for one in feed(cache, course, 2, prefetch=False)]
    resumed = feed(cache, course, 8, prefetch=False, blocks=16, cursor=whole[1][1])
    assert whole[2:] == [(one.samples, one.cursor) for one in resumed]
    assert len({samples for samples, _ in whole}) == len(whole)
