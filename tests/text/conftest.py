"""Token caches made of given tokens, without a tokenizer's work: what the order of training is tested on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from coresident.text import manifest, tokenizer
from coresident.text.cache import TokenCache
from coresident.text.manifest import FamilySplit, Manifest
from coresident.text.shards import ShardWriter

MakeCache = Callable[..., TokenCache]


@pytest.fixture
def cache_of(tmp_path: Path) -> MakeCache:
    """`cache_of({("train", "code"): tokens}, shard_tokens=...)`: a cache of exactly these tokens."""
    made = 0

    def make(streams: Mapping[tuple[str, str], np.ndarray], shard_tokens: int = 1 << 20) -> TokenCache:
        nonlocal made
        made += 1
        path = tmp_path / f"cache{made}"
        (path / manifest.TOKENIZER).mkdir(parents=True)
        (path / manifest.TOKENIZER / "tokenizer.json").write_text("{}")
        parts = []
        for (split, family), tokens in streams.items():
            writer = ShardWriter(path, f"{split}-{family}", shard_tokens)
            writer.write(np.asarray(tokens, "<u2").tobytes())
            parts.append(
                FamilySplit(
                    split=split, family=family, documents=1, tokens=len(tokens), shards=writer.close()
                )
            )
        described = Manifest(
            vocabulary=1 << 16,
            end=0,
            tokenizer={"tokenizer.json": hashlib.sha256(b"{}").hexdigest()},
            streams=tuple(parts),
        )
        (path / manifest.FILE).write_bytes(manifest.render(described))
        return TokenCache.open(path)

    return make


@pytest.fixture(scope="session")
def small_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer of 300 tokens, in a directory as transformers saves it."""
    out = tmp_path_factory.mktemp("small-tokenizer")
    tokenizer.train_byte_bpe(["the cat sat on the mat, and the dog sat on the cat. " * 9], 300, out)
    return out
