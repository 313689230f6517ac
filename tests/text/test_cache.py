"""A token cache is what its manifest says, or an error that names the file and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coresident.errors import UserError
from coresident.text import manifest
from coresident.text.cache import TokenCache

MakeCache = Callable[..., TokenCache]


@pytest.fixture
def cache(cache_of: MakeCache) -> TokenCache:
    return cache_of({("train", "code"): np.arange(100), ("validation", "code"): np.arange(9)}, 40)


def _change(cache: TokenCache, change: Callable[[dict[str, Any]], None]) -> None:
    file = cache.path / manifest.FILE
    described = json.loads(file.read_bytes())
    change(described)
    file.write_text(json.dumps(described))


def test_it_opens_with_its_splits_and_an_identity_that_its_content_gives(
    cache: TokenCache, cache_of: MakeCache
) -> None:
    assert len(cache.tokens("train")) == 100
    assert len(cache.tokens("validation")) == 9
    assert cache.size == 218
    cache.verify()
    same = cache_of({("train", "code"): np.arange(100), ("validation", "code"): np.arange(9)}, 40)
    other = cache_of({("train", "code"): np.arange(1, 101), ("validation", "code"): np.arange(9)}, 40)
    assert cache.identity == same.identity != other.identity


def test_a_token_beyond_the_vocabulary_is_refused_where_it_is_read(cache: TokenCache) -> None:
    shard = cache.path / "train-code-00000.bin"
    content = bytearray(shard.read_bytes())
    content[21] ^= 0xFF
    shard.write_bytes(content)
    smaller = cache.manifest.model_copy(update={"vocabulary": 300})
    (cache.path / manifest.FILE).write_bytes(manifest.render(smaller))
    opened = TokenCache.open(cache.path).tokens("train")
    assert opened.read(0, 10).tolist() == list(range(10))
    with pytest.raises(
        UserError, match=r"holds the token 65290, and its vocabulary ends at 299: a shard was"
    ):
        opened.read(5, 15)


@pytest.mark.parametrize("cut", [False, True])
def test_a_shard_that_is_written_to_while_it_is_read_is_refused(cache: TokenCache, cut: bool) -> None:
    """Through a map the new bytes would be read for those that were verified, and what was cut off ends the process."""
    opened = cache.tokens("train")
    shard = cache.path / "train-code-00001.bin"
    with shard.open("r+b") as stream:
        stream.truncate(0) if cut else stream.write(b"\1\0")
    assert opened.read(0, 40).tolist() == list(range(40))
    with pytest.raises(UserError, match=r"train-code-00001\.bin was written to while it is read"):
        opened.read(39, 41)


def test_a_cache_that_is_replaced_while_it_is_read_goes_on_as_it_was(cache: TokenCache) -> None:
    opened = cache.tokens("train")
    shard = cache.path / "train-code-00001.bin"
    shard.with_suffix(".new").write_bytes(bytes(80))
    shard.with_suffix(".new").replace(shard)
    assert opened.read(0, 100).tolist() == list(range(100))
    shard.unlink()
    assert opened.read(0, 100).tolist() == list(range(100))


def test_a_changed_tokenizer_is_refused_on_open(cache: TokenCache) -> None:
    file = next(one for one in sorted(cache.tokenizer_dir.iterdir()) if one.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1] + b" ")
    with pytest.raises(UserError, match=rf"tokenizer/{file.name} has another checksum"):
        TokenCache.open(cache.path)


def test_tokens_are_little_endian_on_disk(cache_of: MakeCache) -> None:
    cache = cache_of({("train", "code"): np.array([1, 0x0203])})
    assert (cache.path / "train-code-00000.bin").read_bytes() == b"\x01\x00\x03\x02"
    assert cache.tokens("train").read(0, 2).tolist() == [1, 0x0203]


def test_the_identity_ignores_the_order_of_keys_and_spaces(cache: TokenCache) -> None:
    described = json.loads((cache.path / manifest.FILE).read_bytes())
    (cache.path / manifest.FILE).write_text(json.dumps(dict(reversed(described.items())), indent=4))
    assert TokenCache.open(cache.path).identity == cache.identity


def test_what_is_no_cache_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a token cache.*coresident pretrain prepare --out"):
        TokenCache.open(tmp_path / "nowhere")
    (tmp_path / "half.partial").mkdir()
    with pytest.raises(UserError, match="is unfinished"):
        TokenCache.open(tmp_path / "half")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"identity": "x", "format": 1}', "\x00"])
def test_a_manifest_that_is_none_is_refused(cache: TokenCache, content: str) -> None:
    (cache.path / manifest.FILE).write_text(content)
    with pytest.raises(UserError, match=r"manifest\.json is not a token cache's manifest"):
        TokenCache.open(cache.path)


def test_a_changed_manifest_is_refused(cache: TokenCache) -> None:
    _change(cache, lambda described: described.update(vocabulary=5000))
    with pytest.raises(UserError, match="was changed"):
        TokenCache.open(cache.path)


def test_a_manifest_of_another_format_is_named(cache: TokenCache) -> None:
    _change(cache, lambda described: described.update(format=2))
    with pytest.raises(UserError, match="is of format 2, and this version reads 1"):
        TokenCache.open(cache.path)


def test_a_shard_of_another_size_is_refused_at_once(cache: TokenCache) -> None:
    with (cache.path / "train-code-00001.bin").open("ab") as stream:
        stream.write(b"\0\0")
    with pytest.raises(UserError, match=r"train-code-00001\.bin has 82 bytes where manifest\.json says 80"):
        TokenCache.open(cache.path)


@pytest.mark.parametrize("name", ["validation-code-00000.bin", "tokenizer/tokenizer.json"])
def test_a_missing_file_is_refused(cache: TokenCache, name: str) -> None:
    (cache.path / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        TokenCache.open(cache.path)


@pytest.mark.parametrize(
    "name", ["train-code-00002.bin", "validation-code-00000.bin", "tokenizer/tokenizer.json"]
)
def test_one_flipped_bit_is_found_by_verifying(cache: TokenCache, name: str) -> None:
    content = bytearray((cache.path / name).read_bytes())
    content[-1] ^= 1
    (cache.path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} has another checksum"):
        TokenCache.open(cache.path).verify()
