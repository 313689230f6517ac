"""C4: its shards as they lie on a disk, and the hub where there is none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from coresident.errors import MachineError, UserError
from coresident.text.corpus import CorpusSource, Document, documents


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


def _shard(path: Path, *texts: str) -> str:
    rows = [
        {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org"} for text in texts
    ]
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return str(path)


def test_shards_give_their_texts_in_order_and_their_own_validation(tmp_path: Path) -> None:
    first = _shard(tmp_path / "c4-train.00000-of-00002.json.gz", "one\nline", "", "naïve 日本")
    second = _shard(tmp_path / "c4-train.00001-of-00002.json.gz", "last")
    held = _shard(tmp_path / "c4-validation.00000-of-00001.json.gz", "held")
    source = CorpusSource(kind="files", files={"web": (first, second)}, validation={"web": (held,)})
    assert list(documents(source)) == [
        *(Document(text, "web", False) for text in ("one\nline", "", "naïve 日本", "last")),
        Document("held", "web", True),
    ]


def test_a_broken_shard_is_named(tmp_path: Path) -> None:
    whole = Path(_shard(tmp_path / "a.json.gz", *(f"text {number}" for number in range(5000))))
    whole.write_bytes(whole.read_bytes()[:-2000])
    with pytest.raises(UserError, match=r"a\.json\.gz after line \d+: not gzip, or not all of it"):
        list(documents(CorpusSource(kind="files", files={"web": (str(whole),)})))


def test_a_shard_is_read_as_it_is_whatever_it_is_called_and_whatever_its_texts_look_like(
    tmp_path: Path,
) -> None:
    texts = ("2019-04-25T12:57:54Z", "2020-01-01", "12")
    named = _shard(tmp_path / "part[1]*.json.gz", *texts)
    _shard(tmp_path / "part1x.json.gz", "another's")
    assert [one.text for one in documents(CorpusSource(kind="files", files={"web": (named,)}))] == list(texts)


def test_what_is_no_gzip_or_no_json_is_named_with_its_line(tmp_path: Path) -> None:
    shard = tmp_path / "a.jsonl.gz"
    source = CorpusSource(kind="files", files={"web": (str(shard),)})
    shard.write_bytes(b"no gzip at all")
    with pytest.raises(UserError, match=r"a\.jsonl\.gz after line 0: not gzip"):
        list(documents(source))
    shard.write_bytes(gzip.compress(b'{"text": "good"}\n{"text": bad}\n'))
    with pytest.raises(UserError, match=r"a\.jsonl\.gz line 2: not JSON at column 10"):
        list(documents(source))


def test_a_row_without_text_is_named(tmp_path: Path) -> None:
    source = CorpusSource(
        kind="files", files={"web": (_shard(tmp_path / "a.json.gz", "x"),)}, field="content"
    )
    with pytest.raises(UserError, match=r"a\.json\.gz line 1: 'content' is missing"):
        list(documents(source))


def test_a_hub_that_cannot_be_reached_says_what_to_do_instead() -> None:
    with pytest.raises(MachineError, match=r"allenai/c4 cannot be opened.*give its shards as files"):
        next(documents(CorpusSource(kind="hub", dataset="allenai/c4", subset="en")))
