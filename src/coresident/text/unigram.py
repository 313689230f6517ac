"""The simplest model of a text: each token as likely as it was in training. What has learned anything is below its loss."""

from __future__ import annotations

import numpy as np

from coresident.text.blocks import Integers
from coresident.text.cache import Split, TokenCache


def counts(cache: TokenCache, split: Split, family: str | None = None) -> Integers:
    """How often each token occurs in a split: int64[vocabulary]."""
    found = np.zeros(cache.vocabulary, np.int64)
    for tokens in cache.tokens(split, family).chunks():
        found += np.bincount(tokens, minlength=cache.vocabulary)
    return found


def cross_entropy(cache: TokenCache, family: str | None = None) -> float:
    """Nats a validation target under the training split's unigram model (counts with one added, so that none is zero)."""
    smoothed = counts(cache, "train").astype(np.float64) + 1
    held = counts(cache, "validation", family)
    # The first token is no target.
    held[cache.tokens("validation", family).read(0, 1)] -= 1
    return float(-(held * np.log(smoothed / smoothed.sum())).sum() / held.sum())
